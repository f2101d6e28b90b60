"""Restoring a checkpoint into the running program."""
