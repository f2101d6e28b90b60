"""Keeping a run small and whole: retention, garbage collection, compaction, repair."""
