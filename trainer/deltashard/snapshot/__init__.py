"""Sending rows at a snapshot: the Save call, the blocks that rows are written into, and rows that are copied ahead."""
