"""Who came with tokens that are nobody's, lately: such a peer's next unknown token is not worth a question to the API.

Counted by the peer's address, in a window, for a bounded number of peers. A peer may be a node that several pods share
(the host's network, an address translation), so nobody is shut out for longer than the window, and a token that is
known already is never asked about here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

WINDOW_S = 10.0
MAX_BAD = 64
"""Tokens that were refused within the window."""
MAX_PEERS = 4096


def host_of(peer: str) -> str:
    """The address of gRPC's `ipv4:10.0.0.7:51234` without its port."""
    return peer.rpartition(":")[0]


class Strangers:
    """Counts of refused tokens."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._bad: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Peer -> (begin of its window, refused since)."""

    def __len__(self) -> int:
        return len(self._bad)

    def refused(self, peer: str) -> None:
        """A token of this peer's was nobody's."""
        now_s = self._monotonic()
        begun_s, count = self._bad.pop(peer, (now_s, 0))
        self._bad[peer] = (begun_s, count + 1) if now_s - begun_s < WINDOW_S else (now_s, 1)
        while len(self._bad) > MAX_PEERS:
            self._bad.popitem(last=False)

    def waits(self, peer: str) -> bool:
        """Whether this peer has to wait until its window is over."""
        begun_s, count = self._bad.get(peer, (0.0, 0))
        return count >= MAX_BAD and self._monotonic() - begun_s < WINDOW_S
