"""A checkpoint brought back into the living program."""
