"""The contracts between the parts: generated messages and services (`v1`), the layout of the arena (`arena_layout`)."""
