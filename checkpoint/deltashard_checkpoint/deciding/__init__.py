"""How often to save, how precisely, and how to recover: formulas and rules. Pure; no clock, no store, no randomness."""
