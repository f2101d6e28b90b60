"""Optimizers: which leave untouched rows alone, and their state by canonical name."""
