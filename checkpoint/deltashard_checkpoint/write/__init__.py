"""Write a checkpoint: open an attempt, choose the rows of a snapshot, write parts, commit."""
