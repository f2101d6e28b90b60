"""Shared memory: blocks, their ownership, and validation of the batches in them."""
