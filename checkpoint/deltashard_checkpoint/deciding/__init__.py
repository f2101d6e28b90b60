"""Decisions on save interval, precision and recovery.

Pure: no clock, no store; random generators are injected.
"""
