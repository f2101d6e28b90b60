"""What a training program is made of, as values: tables, tensors, generators, positions."""
