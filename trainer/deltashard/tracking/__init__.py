"""Row tracking: which rows of a table changed since the last commit and the last baseline."""
