"""Runs as a whole: copied, removed."""
