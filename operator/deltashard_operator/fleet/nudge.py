"""Nudges: asks sidecars to report at once, by a POST without body, token or meaning beyond that.

A nudge is a hint. One that is lost costs time alone: the sidecar reports at its next beat.
"""

from __future__ import annotations

import asyncio

from deltashard_operator.fleet.metric import FleetMetrics

RATE = 400
"""Nudges a second."""
TURN_S = 0.05
TIMEOUT_S = 2.0
MAX_OPEN = 512
"""Nudges under way: more wait, so that a network that swallows them cannot eat up the open files."""


class Nudger:
    """A queue of nudges, each address once. `run` it as a task."""

    def __init__(self, metrics: FleetMetrics) -> None:
        self._metrics = metrics
        self._queue: dict[str, None] = {}
        self._waiting = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def nudge(self, address: str) -> None:
        """Ask the sidecar at this address (host:port, IPv6 in brackets) to report; "" asks nobody."""
        if address:
            self._queue[address] = None
            self._waiting.set()

    async def run(self) -> None:
        """Send what waits, for ever."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._waiting.wait()
                for _ in range(min(len(self._queue), int(RATE * TURN_S), MAX_OPEN - len(under_way))):
                    address = next(iter(self._queue))
                    del self._queue[address]
                    task = asyncio.create_task(self._send(address))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                if not self._queue:
                    self._waiting.clear()
                await asyncio.sleep(TURN_S)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _send(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        line = b""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=4096)
                try:
                    head = f"POST /v1/report HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n"
                    writer.write(f"{head}Connection: close\r\n\r\n".encode())
                    line = await reader.readline()
                finally:
                    writer.close()
        except (OSError, ValueError):  # a time-out and a name that is none, too
            pass
        # The status line alone is read: nothing is followed.
        self._metrics.nudges.labels("sent" if b" 202" in line[:16] else "failed").inc()
