"""Data loaders: the position of the delivered batch and the state that belongs to it."""
