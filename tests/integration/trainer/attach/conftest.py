"""Sidecars are spawned here, as for users: how they are started is what these tests look at."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def forked_sidecars() -> None:
    """Take the place of the folder's above."""
