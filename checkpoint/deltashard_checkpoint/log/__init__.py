"""The commit log: its entries, the pure fold that validates them, and the I/O shell that reads and appends."""
