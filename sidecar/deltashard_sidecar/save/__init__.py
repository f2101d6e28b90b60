"""One save: its life as data, its threads, and where its batches go."""
