"""The end of the controller's process, its parts played: what has ended before what."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from deltashard_operator.controller_main import Options, Process
from kubernetes import client

DEADLINE_S = 60.0


def test_the_watches_have_ended_before_what_is_unwritten_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New facts would mark runs for ever, and the drain ends when none is marked. A second signal hurries it."""

    async def scenario() -> list[str]:
        options = Options(host="127.0.0.1", metrics_port=0, certificates="external", certificate_dir=tmp_path)
        process = Process(options, client.ApiClient())
        happened: list[str] = []

        async def at_once() -> None:
            pass

        async def for_ever() -> None:
            await asyncio.Event().wait()

        async def watch() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await for_ever()
            finally:
                await asyncio.sleep(0)
                happened.append("watch ended")

        async def drain(_timeout_s: float) -> None:
            names = {each.get_name() for each in asyncio.all_tasks()}
            assert {"lease", "pump"} <= names
            assert "lead" not in names
            happened.append("drained")
            os.kill(os.getpid(), signal.SIGTERM)
            await for_ever()

        async def release() -> None:
            happened.append("released")

        monkeypatch.setattr(process.lease, "acquire", at_once)
        monkeypatch.setattr(process.lease, "_until_s", float("inf"))
        monkeypatch.setattr(process.lease, "keep", for_ever)
        monkeypatch.setattr(process.lease, "release", release)
        monkeypatch.setattr(process, "_load", at_once)
        monkeypatch.setattr(process.watch, "run", watch)
        monkeypatch.setattr(process.controller, "drain", drain)
        async with asyncio.timeout(DEADLINE_S):
            await process.serve()
        return happened

    assert asyncio.run(scenario()) == ["watch ended", "drained", "released"]
