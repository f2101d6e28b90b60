"""Optimizers: which ones leave untouched rows unchanged, and their state by canonical name."""
