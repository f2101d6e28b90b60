"""Nudges: requests to sidecars to report now, as a POST without body or token.

A nudge is a hint. If one is lost, the sidecar reports at its next interval.
"""

from __future__ import annotations

import asyncio
import itertools

import aiohttp

from deltashard_operator.fleet.metric import FleetMetrics

RATE = 200
BATCH_INTERVAL_S = 0.05
TIMEOUT_S = 2.0


class Nudger:
    """Queue of nudges by address. `run` it as a task."""

    def __init__(self, metrics: FleetMetrics) -> None:
        self._metrics = metrics
        self._queue: dict[str, None] = {}
        self._pending = asyncio.Event()

    def nudge(self, address: str) -> None:
        """Ask the sidecar at this address (host:port, IPv6 in brackets) to report. An empty address is ignored."""
        if address:
            self._queue[address] = None
            self._pending.set()

    async def run(self) -> None:
        timeout, connector = aiohttp.ClientTimeout(TIMEOUT_S), aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            while True:
                await self._pending.wait()
                for address in list(itertools.islice(self._queue, int(RATE * BATCH_INTERVAL_S))):
                    del self._queue[address]
                    group.create_task(self._send(session, address))
                if not self._queue:
                    self._pending.clear()
                await asyncio.sleep(BATCH_INTERVAL_S)

    async def _send(self, session: aiohttp.ClientSession, address: str) -> None:
        outcome = "failed"
        try:
            async with session.post(f"http://{address}/v1/report", allow_redirects=False) as response:
                outcome = "sent" if response.status == 202 else "failed"
        except (aiohttp.ClientError, OSError, ValueError):  # includes timeouts and invalid names
            pass
        self._metrics.nudges.labels(outcome).inc()
