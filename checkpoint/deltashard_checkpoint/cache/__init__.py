"""Packs on the local disk: being filled, and kept for the next restore."""
