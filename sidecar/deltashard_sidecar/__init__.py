"""Sidecar process, one per pod: arena, encode and upload pipeline, restore server, save timer. Imports no torch."""
