"""One save: its lifecycle table, its threads, and the sink of its batches."""
