"""Which rows changed since what: marks, and the ways a table learns them."""
