"""The contracts between the parts: generated messages and services (`v1`), the arena (`arena_layout`), `cause`."""
