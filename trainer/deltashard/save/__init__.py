"""A cut: when it is taken, what it copies, how it is sent, what it becomes."""
