"""The contracts between the parts: generated messages and services (`v1`), and the layout of the arena (`arenas`)."""
