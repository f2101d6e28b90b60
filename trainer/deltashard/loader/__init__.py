"""Data loaders: where the batch stands that was delivered, and what belongs to it."""
