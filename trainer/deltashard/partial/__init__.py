"""Partial recovery: survivors of a lost rank keep their rows; see docs/design/028-partial-recovery.md."""
