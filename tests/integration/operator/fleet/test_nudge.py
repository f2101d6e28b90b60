"""Nudges reach each address once, at a limited rate, and an unresponsive address does not block others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from deltashard_operator.fleet import nudge
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.nudge import Nudger

from tests.support.eventually import eventually_async
from tests.support.server.port import free_port


@asynccontextmanager
async def listening(answer: bytes | None, host: str = "127.0.0.1") -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve one answer, or none, on a port. Yield its address and the requests that it received."""
    received: list[bytes] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            received.append(await reader.readuntil(b"\r\n\r\n"))
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(served, host, 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), received
    finally:
        server.close()


def test_each_sidecar_is_nudged_once_without_blocking_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are IPv4 and IPv6. Silent, absent, invalid and redirecting ones only count as failures."""
    monkeypatch.setattr(nudge, "TIMEOUT_S", 0.5)

    async def scenario() -> None:
        metrics = FleetMetrics()
        nudger = Nudger(metrics)
        moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"
        async with (
            listening(b"HTTP/1.1 202 Accepted\r\n\r\n") as (four, received),
            listening(b"HTTP/1.1 202 Accepted\r\n\r\n", "::1") as (six, received_six),
            listening(moved) as (redirecting, _),
            listening(None) as (silent, _),
        ):
            running = asyncio.create_task(nudger.run())
            for _ in range(2):
                for address in (silent, four, six, redirecting, f"127.0.0.1:{free_port()}", "nonsense", ""):
                    nudger.nudge(address)
            counted = lambda outcome: metrics.nudges.labels(outcome)._value.get()  # noqa: E731
            await eventually_async(lambda: (counted("sent"), counted("failed")) == (2, 4), "all nudges")
            assert [each.split(b"\r\n")[0] for each in received] == [b"POST /v1/report HTTP/1.1"]
            assert len(received_six) == 1
            nudger.nudge(four)
            await eventually_async(lambda: len(received) == 2, "once more")
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    asyncio.run(scenario())
