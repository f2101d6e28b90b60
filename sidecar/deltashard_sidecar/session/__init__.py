"""Attached trainers and their notices."""
