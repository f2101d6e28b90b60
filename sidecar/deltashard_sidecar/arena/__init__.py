"""The shared memory: blocks, who may touch them, what a batch in one says."""
