"""Writing a checkpoint: open an attempt, choose what the cut holds, write parts, commit."""
