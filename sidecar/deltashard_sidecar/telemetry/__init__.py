"""Log lines, metrics and incidents."""
