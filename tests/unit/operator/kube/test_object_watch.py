"""The end of kopf's loop: what is silenced, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest
from deltashard_operator.kube import object_watch
from kopf._cogs.clients import watching
from kopf._cogs.structs.references import Resource

RESOURCE: Any = Resource(group="batch", version="v1", plural="jobs")
WATCHES = 64


async def _one_event(**_: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"type": "ADDED", "object": {}}
    await asyncio.Event().wait()


async def _left_open(*, silenced: bool) -> None:
    """As kopf's readers leave their watches when they are cancelled over an event: begun, and not closed.

    Whether one of them is closed before what is inside it, is chance: of so many some are.
    """
    if silenced:
        asyncio.get_running_loop().set_exception_handler(object_watch.drop_unclosed)
    watches = [
        watching.infinite_watch(settings=kopf.OperatorSettings(), resource=RESOURCE, namespace=None)
        for _ in range(WATCHES)
    ]
    for each in watches:
        await anext(each)
    asyncio.get_running_loop().__dict__["kept"] = watches  # as long as the loop, as kopf's tasks keep theirs


def test_watches_that_kopf_does_not_close_end_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without our handler each would be an error with a traceback; should that end, the handler can go."""
    monkeypatch.setattr(watching, "continuous_watch", _one_event)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        asyncio.run(_left_open(silenced=False))
        assert "didn't stop after athrow()" in caplog.text
        caplog.clear()
        asyncio.run(_left_open(silenced=True))
        assert not caplog.records


def test_every_other_error_of_the_loop_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(object_watch.drop_unclosed)
        loop.call_exception_handler({"message": "one", "exception": ValueError("x")})
        loop.call_exception_handler({"message": "two"})

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        asyncio.run(main())
    assert [each.message.splitlines()[0] for each in caplog.records] == ["one", "two"]
