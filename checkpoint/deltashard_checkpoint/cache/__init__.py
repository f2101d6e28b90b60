"""Packs on the local disk: being filled, or kept for the next restore."""
