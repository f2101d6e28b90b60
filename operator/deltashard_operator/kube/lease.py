"""Leader election by a Lease: only one of several live controllers writes.

The protocol is client-go's, but no clocks are compared: another controller takes the Lease after it has not changed for
`DURATION_S` on its own clock. Every write carries the version that was read, so one of two concurrent writes fails. A
holder that cannot renew stops being the leader `MARGIN_S` before another may take over. A controller that finds another
holder in a Lease that it held must exit, because its counters are stale. An unavailable API alone does not cause an
exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.kube.call import ApiResponse, ApiUnavailable, Caller

NAME = "deltashard-controller"
DURATION_S = 10.0
RENEW_S = 2.0
MARGIN_S = 3.0
CALL_S = 5.0
"""Timeout in seconds of a read or a write of the Lease."""
REQUEST_S = 2.0, 3.0
"""Timeouts in seconds to connect and to read, so that a silently lost connection costs one try and not the Lease."""
RELEASE_S = 3.0
Document = dict[str, Any]
_log = structlog.get_logger("deltashard.lease")


class LeaseLost(EnvironmentFault):
    """Another controller took over the Lease."""


class Lease:
    """Leader-election Lease of the controller. Use it on one asyncio loop."""

    def __init__(
        self,
        call: Caller,
        *,
        namespace: str,
        identity: str,
        duration_s: float = DURATION_S,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._call = call
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._identity = identity
        self._duration_s = duration_s
        self._monotonic = monotonic
        self._sleep = sleep
        self._last_version: tuple[str, float] = ("", 0.0)
        """Version of the Lease, and when it was first seen (monotonic seconds)."""
        self._until_s = 0.0
        self.was_leader = False
        """Whether this controller has ever held the Lease."""
        self.other_leader_seen = False
        """Whether another controller has renewed the Lease; a leftover Lease has a holder, too."""
        self.refused = ""
        """Error with which the API denied the Lease; empty while it is accessible."""

    @property
    def held(self) -> bool:
        return self._monotonic() < self._until_s

    async def acquire(self) -> None:
        _log.info("lease.waiting", lease=NAME)
        while not await self._acquire_or_renew():
            await self._sleep(RENEW_S)
        _log.info("lease.acquired", lease=NAME, identity=self._identity)

    async def keep(self) -> None:
        """Renew the Lease forever. Raises `LeaseLost`."""
        while True:
            await self._sleep(RENEW_S)
            await self._acquire_or_renew()

    async def release(self) -> None:
        """Release the Lease if held, within `RELEASE_S`, so that the next leader need not wait."""
        if not self.was_leader:
            return
        with contextlib.suppress(ApiUnavailable, TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                found = await self._call("GET", f"{self._path}/{NAME}", tries=1)
                if found.ok and _holder(found.document) == self._identity:
                    await self._put(found.document, holder="")
        self._until_s = 0.0

    async def _acquire_or_renew(self) -> bool:
        """Acquire or renew the Lease and return whether it is held. Raises `LeaseLost`."""
        begun_s = self._monotonic()
        try:
            async with asyncio.timeout(CALL_S):
                ours = await self._try_acquire()
        except (ApiUnavailable, TimeoutError) as error:
            _log.warning("lease.unavailable", error=f"{type(error).__name__}: {error}"[:300])
            return self.held
        if ours:
            self.was_leader, self.refused = True, ""
            self._until_s = begun_s + self._duration_s - MARGIN_S
        return ours

    async def _try_acquire(self) -> bool:
        found = await self._call("GET", f"{self._path}/{NAME}", tries=1)
        if found.status == 404:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NAME}}
            found = await self._call("POST", self._path, body, tries=1)
        if not found.ok:
            return self._on_rejected(found)
        lease, now_s = found.document, self._monotonic()
        version, holder = str(lease["metadata"].get("resourceVersion", "")), _holder(lease)
        if version != self._last_version[0]:
            self.other_leader_seen = self.other_leader_seen or (
                bool(self._last_version[0]) and holder not in {"", self._identity}
            )
            self._last_version = version, now_s
        if holder not in {"", self._identity}:
            if self.was_leader:
                raise LeaseLost(
                    f"{holder} leads now",
                    where=f"Lease {NAME}",
                    remedy="the restarted process waits for the Lease",
                )
            if now_s < self._last_version[1] + self._duration_s:
                self.refused = ""
                return False
        written = await self._put(lease, holder=self._identity)
        return written.ok or self._on_rejected(written)

    def _on_rejected(self, answer: ApiResponse) -> bool:
        """Record a rejected write, a conflict (409) or a denial, and return False."""
        before, self.refused = self.refused, "" if answer.status == 409 else answer.sentence
        if self.refused and self.refused != before:
            _log.warning("lease.refused", lease=NAME, error=self.refused)
        return False

    async def _put(self, lease: Mapping[str, Any], *, holder: str) -> ApiResponse:
        before = lease.get("spec") or {}
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "leaseDurationSeconds": int(self._duration_s),
            "renewTime": now,
            "acquireTime": now if _holder(lease) != holder else before.get("acquireTime", now),
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (_holder(lease) != holder),
            **({"holderIdentity": holder} if holder else {}),
        }
        # With the version that was read, a concurrent write makes this one a conflict.
        return await self._call("PUT", f"{self._path}/{NAME}", {**lease, "spec": spec}, tries=1)


def _holder(lease: Mapping[str, Any]) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")
