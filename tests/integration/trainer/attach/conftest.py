"""Sidecars are spawned here, as in production, because these tests cover the start."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def forked_sidecars() -> None:
    """Override the parent folder's fixture."""
