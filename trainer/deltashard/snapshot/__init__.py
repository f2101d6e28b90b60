"""How rows leave the trainer at a cut: the call, the blocks they are written into, and what is copied ahead of it."""
