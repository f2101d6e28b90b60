"""No test in this folder starts a process or serves a port: see tests/support/purity.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support import purity


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Fixtures are watched, too."""
    with _watched(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The test itself."""
    with _watched(item):
        return (yield)


@contextmanager
def _watched(item: pytest.Item) -> Iterator[None]:
    try:
        with purity.watch().over(item.nodeid):
            yield
    except purity.Impure as refusal:
        pytest.fail(str(refusal))
