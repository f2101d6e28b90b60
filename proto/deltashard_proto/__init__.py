"""The contracts between the parts: messages and services (`v1`), `arena_layout`, `cause`, `message_limit`."""
