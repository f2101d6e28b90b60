"""Keeping a run small and whole: retention, garbage collection, compaction, repair, and people's words."""
