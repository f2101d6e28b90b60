"""Maintenance of a run: retention, garbage collection, compaction, repair, and user entries."""
