"""Certificates: made, judged, renewed, read."""
