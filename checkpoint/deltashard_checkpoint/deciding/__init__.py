"""What to decide from what was seen: pure functions of numbers, for every part and the benches."""
