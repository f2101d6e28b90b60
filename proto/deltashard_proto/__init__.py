"""Contracts between the components: messages and services (`v1`), `arena_layout`, `cause`, `message_limit`."""
