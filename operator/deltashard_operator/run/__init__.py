"""State of one run and the conclusions drawn from it, as pure functions."""
