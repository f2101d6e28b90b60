"""The commit log: what its entries say, the pure fold that judges them, and the shell that reads and appends."""
