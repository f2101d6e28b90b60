"""The contracts between the parts: messages and services (`v1`), the arena (`arena_layout`), `cause`, `message_limit`."""
