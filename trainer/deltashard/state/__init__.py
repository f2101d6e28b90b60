"""State of a training program as values: tables, tensors, generators, positions."""
