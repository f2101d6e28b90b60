"""The generated pages in docs/reference are those that the code renders."""

from __future__ import annotations

from tools import reference


def test_reference_pages_are_up_to_date() -> None:
    assert reference.stale() == []
