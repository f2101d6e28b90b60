"""Gathers all ranks for one `restore()`: ranks submit to rank 0, and rank 0 broadcasts to all ranks.

    hello      each rank publishes a random token and its manifest
    welcome    rank 0 publishes the tokens of all ranks, under a new name for the rendezvous
    here       each rank that finds its token in the welcome confirms; rank 0 begins when all have confirmed

The store and its keys survive a restart by torchrun. A hello of an earlier process is welcomed in vain: the new process
sends another token, and rank 0 welcomes again. Later messages are stored under the random name of the rendezvous, which
earlier processes do not know.

Collectives are not used, because one that misses its deadline would break the user's process group.
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from deltashard_checkpoint.crash_point import crash_point

from deltashard.errors import RanksDiffer
from deltashard.group.group_store import GroupStore
from deltashard.state.replica import format_ranks

RENDEZVOUS_TIMEOUT_S = 600.0
"""Seconds within which all ranks must call `restore()`; a rank may still be loading its data."""
FIRST_LOOK_S, LAST_LOOK_S = 0.002, 0.2
_COMMON = "deltashard/"
_CHUNK_BYTES = 4 << 20
"""Bytes per value; torch's store accepts at most eight million."""

_numbers = itertools.count(1)
"""Ranks build their Checkpointers in the same order, so that the n-th rendezvous is the same on all ranks."""

T = TypeVar("T")


def _wait(poll: Callable[[], T | None], until_s: float) -> T | None:
    """Return the result of `poll`, or None if there is none by `until_s` (monotonic)."""
    pause_s, idle = FIRST_LOOK_S, threading.Event()
    while (found := poll()) is None and time.monotonic() < until_s:
        idle.wait(pause_s)
        pause_s = min(1.5 * pause_s, LAST_LOOK_S)
    return found


class Rendezvous:
    """One rank's side of a rendezvous; used on the training thread only."""

    def __init__(self, rank: int, world_size: int, manifest: bytes) -> None:
        """Gather all ranks; `manifest` describes this rank.

        Raises:
            RanksDiffer: A rank is missing after RENDEZVOUS_TIMEOUT_S.
            GroupLost: The store does not answer.
        """
        self.rank = rank
        self.world_size = world_size
        self._store = GroupStore(_COMMON)
        self._number = next(_numbers)
        self._token = secrets.token_hex(8)
        self._until_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        self.name = ""
        """Random name of this rendezvous."""
        self.manifests: list[bytes] = []
        """Manifests of all ranks, on rank 0."""
        self._store.put(f"hello/{self._number}/{rank}", self._token.encode() + b"\n" + manifest)
        crash_point("rendezvous.hello")
        self._lead() if rank == 0 else self._join()

    @property
    def prefix(self) -> str:
        return f"{_COMMON}{self.name}/"

    def broadcast(self, what: str, payload: bytes) -> None:
        self._store.put(f"{self.name}/broadcast/{what}", payload)

    def await_broadcast(self, what: str, within_s: float) -> bytes:
        """Return rank 0's broadcast; raises `RanksDiffer` if there is none within `within_s` seconds."""
        found = _wait(lambda: self._store.get(f"{self.name}/broadcast/{what}"), time.monotonic() + within_s)
        if found is None:
            raise RanksDiffer(
                f"rank 0 sent nothing for {within_s:.0f} s",
                where="restore()",
                remedy="check its log, then restart all ranks",
            )
        return found

    def submit(self, what: str, payload: bytes) -> None:
        self._store.put(f"{self.name}/submitted/{what}/{self.rank}", payload)

    def gather(self, what: str, within_s: float) -> list[bytes]:
        """Return the submissions of all ranks, on rank 0; raises `RanksDiffer` naming the missing ranks."""
        keys = [f"{self.name}/submitted/{what}/{rank}" for rank in range(self.world_size)]
        found = _wait(lambda: self._store.get_all(keys), time.monotonic() + within_s)
        if found is None:
            raise self._missing(keys, within_s)
        return found

    def send(self, what: str, data: bytes | None) -> None:
        """Send bytes to any rank that receives them, in chunks; None reports that this rank cannot send them."""
        for at in range(0, len(data or b""), _CHUNK_BYTES):
            self._store.put(f"{self.name}/sent/{what}/{at}", (data or b"")[at : at + _CHUNK_BYTES])
        self._store.put(f"{self.name}/sent/{what}", json.dumps(None if data is None else len(data)).encode())

    def receive(self, what: str, within_s: float) -> bytes | None:
        """Return the bytes that another rank sends, or None if it cannot; raises `RanksDiffer` on a timeout."""
        header = _wait(lambda: self._store.get(f"{self.name}/sent/{what}"), time.monotonic() + within_s)
        if header is None:
            raise RanksDiffer(
                f"a rank was to send {what}, and sent nothing for {within_s:.0f} s",
                where="restore()",
                remedy="check the ranks' logs, then restart all of them",
            )
        size = json.loads(header)
        if size is None:
            return None
        parts = range(0, size, _CHUNK_BYTES)
        return b"".join(self._store.get(f"{self.name}/sent/{what}/{at}") or b"" for at in parts)

    def delete_sent(self, what: str, size: int) -> None:
        for at in range(0, size, _CHUNK_BYTES):
            self._store.delete(f"{self.name}/sent/{what}/{at}")

    def _lead(self) -> None:
        hellos = [f"hello/{self._number}/{rank}" for rank in range(self.world_size)]
        tokens: list[str] = []

        def all_here() -> bool | None:
            nonlocal tokens
            found = self._store.get_all(hellos)
            if found is None:
                return None
            now = [manifest.partition(b"\n")[0].decode() for manifest in found]
            if now != tokens:
                tokens = now
                self.name = secrets.token_hex(8)
                self.manifests = [manifest.partition(b"\n")[2] for manifest in found]
                self._store.put(f"here/{self.name}/0", b"")
                self._store.put(f"welcome/{self._number}", json.dumps([self.name, tokens]).encode())
                crash_point("rendezvous.welcomed")
            return None if self._store.get_all(self._here_keys()) is None else True

        if _wait(all_here, self._until_s) is None:
            raise self._missing(self._here_keys() if self.name else hellos, RENDEZVOUS_TIMEOUT_S)
        self.broadcast("begun", b"")

    def _here_keys(self) -> list[str]:
        return [f"here/{self.name}/{rank}" for rank in range(self.world_size)]

    def _join(self) -> None:
        def begun() -> bool | None:
            welcome = self._store.get(f"welcome/{self._number}")
            if welcome is None:
                return None
            name, tokens = json.loads(welcome)
            if len(tokens) != self.world_size or tokens[self.rank] != self._token:
                return None
            if name != self.name:
                self.name = name
                self._store.put(f"here/{name}/{self.rank}", b"")
                crash_point("rendezvous.here")
            return None if self._store.get(f"{name}/broadcast/begun") is None else True

        if _wait(begun, self._until_s) is None:
            raise RanksDiffer(
                f"rank {self.rank} waited for the other ranks for {RENDEZVOUS_TIMEOUT_S:.0f} s",
                where="restore()",
                remedy="call restore() on every rank, equally often and in the same order; see rank 0's log",
            )

    def _missing(self, awaited: list[str], waited_s: float) -> RanksDiffer:
        ranks = [rank for rank, key in enumerate(awaited) if self._store.get(key) is None]
        return RanksDiffer(
            f"no message of ranks {format_ranks(ranks, 8)} for {waited_s:.0f} s",
            where="restore()",
            remedy="call restore() on every rank, equally often and in the same order; see their logs",
        )
