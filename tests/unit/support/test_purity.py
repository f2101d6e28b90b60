"""Tests of tests/unit's promise: what it refuses is refused, and told even when the refusal is swallowed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from multiprocessing import get_context

import grpc
import pytest

from tests.support import purity


def _bound() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))


@pytest.mark.parametrize(
    "act",
    [
        lambda: subprocess.run(["true"], check=True),
        lambda: os.system("true"),
        lambda: os.fork() or os._exit(0),
        lambda: get_context("fork").Process().start(),
        lambda: get_context("spawn").Process().start(),
        lambda: grpc.server(None),
        lambda: grpc.aio.server(),  # noqa: PLW0108 - its door is put up later
        _bound,
    ],
    ids=["subprocess", "system", "fork", "multiprocessing fork", "spawn", "grpc", "grpc.aio", "socket"],
)
def test_a_process_or_a_port_is_refused_by_the_tests_name(
    act: Callable[[], object], request: pytest.FixtureRequest
) -> None:
    watch = purity.watch()
    with pytest.raises(purity.Impure, match=request.node.name.split("[")[0]):
        act()
    assert len(watch.refused) == 1
    watch.refused.clear()  # asked for


def test_a_refusal_that_is_swallowed_fails_the_test() -> None:
    watch = purity.watch()
    name = watch.test
    assert name is not None
    swallowed = contextlib.suppress(purity.Impure)
    with pytest.raises(purity.Impure, match="went on"), watch.over("another"), swallowed:
        subprocess.run(["true"], check=True)
    watch.test, watch.refused = name, []
