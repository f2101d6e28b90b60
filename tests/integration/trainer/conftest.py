"""Checkpointers in the tests' own process fork their sidecars."""

from __future__ import annotations

from tests.support.forked_sidecar import forked_sidecars  # noqa: F401 - for all tests of this folder
