"""Coordination of the ranks of a run over a shared key-value store: membership, and the step of each snapshot."""
