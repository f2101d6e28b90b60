"""A Lease: of two controllers that live at one time (one on a node that was cut off), one writes.

As client-go does it, but that nobody compares two clocks: others take the Lease when it did not change for `DURATION_S`
by their own. Every write is of the version that was read, so of two that write at once one is refused. A holder that
cannot write calls itself none `MARGIN_S` before anybody may take it. Who finds another's name in the Lease that it held
ends for a fresh process: what it counted is old. An API that is away is no such reason.
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
"""Seconds for a read or a write; one that takes longer counts as failed."""
REQUEST_S = 2.0, 3.0
"""Seconds to connect and to read: a connection that was lost unseen must cost one try, and not the Lease."""
RELEASE_S = 3.0
Document = dict[str, Any]
_log = structlog.get_logger("deltashard.lease")


class LeaseLost(EnvironmentFault):
    """Another controller has the Lease that this one had."""


class Lease:
    """The controller's Lease. Use it on one asyncio loop."""

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
        """Version of the Lease, and since when it is seen (monotonic seconds)."""
        self._until_s = 0.0
        self.was_leader = False
        """Whether it ever had it."""
        self.other_leader_seen = False
        """Whether another one was ever seen to renew it: a Lease that is left over has a holder, too."""
        self.refused = ""
        """Why the API does not let it have the Lease; empty while it does."""

    @property
    def held(self) -> bool:
        return self._monotonic() < self._until_s

    async def acquire(self) -> None:
        """Wait until it is ours."""
        _log.info("lease.waiting", lease=NAME)
        while not await self._acquire_or_renew():
            await self._sleep(RENEW_S)
        _log.info("lease.acquired", lease=NAME, identity=self._identity)

    async def keep(self) -> None:
        """Renew it for ever; raises `LeaseLost`."""
        while True:
            await self._sleep(RENEW_S)
            await self._acquire_or_renew()

    async def release(self) -> None:
        """Let go of it, if it is ours, within a moment; whoever comes next need not wait."""
        if not self.was_leader:
            return
        with contextlib.suppress(ApiUnavailable, TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                found = await self._call("GET", f"{self._path}/{NAME}", tries=1)
                if found.ok and _holder(found.document) == self._identity:
                    await self._put(found.document, holder="")
        self._until_s = 0.0

    async def _acquire_or_renew(self) -> bool:
        """Take or renew it; whether it is ours now. Raises `LeaseLost`."""
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
                    f"{holder} leads now", where=f"Lease {NAME}", remedy="a fresh process waits for its turn"
                )
            if now_s < self._last_version[1] + self._duration_s:
                self.refused = ""
                return False
        written = await self._put(lease, holder=self._identity)
        return written.ok or self._on_rejected(written)

    def _on_rejected(self, answer: ApiResponse) -> bool:
        """Not ours by this answer, which is either another's write in between (409) or a refusal."""
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
        # The version that was read goes with it: who wrote in between has it.
        return await self._call("PUT", f"{self._path}/{NAME}", {**lease, "spec": spec}, tries=1)


def _holder(lease: Mapping[str, Any]) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")
