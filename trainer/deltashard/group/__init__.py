"""The ranks of one run, over a key-value store that they share: who is there, and which step they all cut at."""
