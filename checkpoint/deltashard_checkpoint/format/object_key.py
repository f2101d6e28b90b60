"""Names of a run's data objects: built here, parsed here, nowhere else.

    data/{attempt:020d}/{cut:08d}/{rank:05d}-{token}-{n:05d}.pack      frames of one rank of one cut
    data/{attempt:020d}/{cut:08d}/{rank:05d}-{token}-s{n:05d}.pack     their tails: optimizer state
    data/{attempt:020d}/{cut:08d}/{rank:05d}-{token}-{xxh3}.index      their directory; the name carries its hash
    data/compact-{token}/{n:05d}.pack, s{n:05d}.pack and {xxh3}.index   the same of a compaction

A compaction's token says the slot of the log at which it began (`compaction_token`): what is known of the run's past
decides whether it may still be committed, as an attempt's number does for cuts.

All are relative to the run's root; `run_key` makes a store key of them. Zero padding makes the store's listing order
the numeric order. `token` is random per process, so a restarted process never takes an older one's object for its own.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from deltashard_checkpoint.errors import CorruptObject, UserError

TOKEN_PATTERN = r"[0-9a-z]{8,32}"  # noqa: S105 - a name, not a secret
RESERVED = frozenset({"cache", "closing", "data", "layout", "log", "probe"})
"""Folders of a run: one of such a name would lie among the objects of the run above it."""
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*", re.ASCII)
_TOKEN = re.compile(TOKEN_PATTERN, re.ASCII)
_PACK = re.compile(
    rf"data/([0-9]{{20}})/([0-9]{{8}})/([0-9]{{5}})-({TOKEN_PATTERN})-(s?)([0-9]{{5}})\.pack", re.ASCII
)
_INDEX = re.compile(
    rf"data/([0-9]{{20}})/([0-9]{{8}})/([0-9]{{5}})-({TOKEN_PATTERN})-([0-9a-f]{{32}})\.index", re.ASCII
)
_COMPACT_PACK = re.compile(rf"data/compact-({TOKEN_PATTERN})/(s?)([0-9]{{5}})\.pack", re.ASCII)
_BEGUN = re.compile(r"data/compact-([0-9]{15})x[0-9a-f]{16}/", re.ASCII)
_COMPACT_INDEX = re.compile(rf"data/compact-({TOKEN_PATTERN})/([0-9a-f]{{32}})\.index", re.ASCII)
_LIMITS = (("attempt", 10**20), ("cut", 10**8), ("rank", 10**5), ("n", 10**5))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackKey:
    """A pack's name, parsed. `attempt`, `cut` and `rank` are None for a compaction's pack."""

    attempt: int | None
    cut: int | None
    rank: int | None
    token: str
    n: int
    state: bool
    """Whether it has tails, not frames: packs of both kinds are counted by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKey:
    """An index's name, parsed. `attempt`, `cut` and `rank` are None for a compaction's index."""

    attempt: int | None
    cut: int | None
    rank: int | None
    token: str
    xxh3: str
    """xxh3-128 of the index's bytes, 32 hexadecimal digits."""


def new_token() -> str:
    """A fresh random token: 64 bits, 16 hexadecimal digits."""
    return secrets.token_hex(8)


def compaction_token(slot: int) -> str:
    """A fresh token for a compaction that begins when `slot` is the last slot of the log."""
    return f"{slot:015d}x{new_token()}"


def compaction_slot(prefix: str) -> int | None:
    """The slot at which the compaction of this prefix began; None for a cut's, and for one whose name does not say."""
    match = _BEGUN.fullmatch(prefix)
    return int(match[1]) if match else None


def run_key(run: str, key: str) -> str:
    """The store key of `key`, which is relative to the root of `run`."""
    return f"{run}/{key}"


def validate_run(run: str) -> str:
    """`run` itself if it can name a run: '/'-separated words of letters, digits, '.', '_' and '-'; else `UserError`."""
    if len(run) > 512 or _RUN.fullmatch(run) is None:
        raise UserError(
            f"{run!r} cannot name a run",
            remedy="use letters, digits, '.', '_', '-', in words separated by '/'; no word begins with '.' or '-'",
        )
    return run


def validate_new_run(run: str) -> str:
    """`run` itself if a run of this name may be begun; else `UserError`. What was begun under another is still read."""
    if taken := reserved(run):
        raise UserError(
            f"{run!r} cannot name a new run: {taken!r} is a folder that every run has",
            remedy=f"use another word; these are taken: {', '.join(sorted(RESERVED))}",
        )
    return validate_run(run)


def reserved(run: str) -> str | None:
    """The word of a run's name that is a folder of the run above it; None in any name that may be begun.

    The first of several words is free: it is a namespace, with no run above it in this store.
    """
    first, *inner = run.split("/")
    return next((word for word in inner or [first] if word in RESERVED), None)


def snapshot_prefix(attempt: int, cut: int) -> str:
    """What all data objects of one cut of one attempt begin with; what a retire entry names."""
    _check(attempt=attempt, cut=cut)
    return f"data/{attempt:020d}/{cut:08d}/"


def compaction_prefix(token: str) -> str:
    _check_token(token)
    return f"data/compact-{token}/"


def pack_key(*, attempt: int, cut: int, rank: int, token: str, n: int, state: bool = False) -> str:
    """The n-th pack of frames of a rank's part of a cut, or (`state`) of their tails."""
    _check(rank=rank, n=n)
    _check_token(token)
    return f"{snapshot_prefix(attempt, cut)}{rank:05d}-{token}-{'s' if state else ''}{n:05d}.pack"


def index_key(*, attempt: int, cut: int, rank: int, token: str, xxh3: str) -> str:
    """The index of a rank's part of a cut; `xxh3` is the hex xxh3-128 of its bytes."""
    _check(rank=rank)
    _check_token(token)
    return f"{snapshot_prefix(attempt, cut)}{rank:05d}-{token}-{xxh3}.index"


def compaction_pack_key(*, token: str, n: int, state: bool = False) -> str:
    _check(n=n)
    return f"{compaction_prefix(token)}{'s' if state else ''}{n:05d}.pack"


def compaction_index_key(*, token: str, xxh3: str) -> str:
    """The index of a compaction; `xxh3` is the hex xxh3-128 of its bytes."""
    return f"{compaction_prefix(token)}{xxh3}.index"


def parse_pack_key(key: str) -> PackKey:
    """The parts of a pack's name; raises `CorruptObject` when it is none."""
    if match := _PACK.fullmatch(key):
        attempt, cut, rank, token, state, n = match.groups()
        return PackKey(
            attempt=int(attempt), cut=int(cut), rank=int(rank), token=token, n=int(n), state=bool(state)
        )
    if match := _COMPACT_PACK.fullmatch(key):
        token, state, n = match.groups()
        return PackKey(attempt=None, cut=None, rank=None, token=token, n=int(n), state=bool(state))
    raise CorruptObject("not a pack's name", where=repr(key[:200]))


def parse_index_key(key: str) -> IndexKey:
    """The parts of an index's name; raises `CorruptObject` when it is none."""
    if match := _INDEX.fullmatch(key):
        attempt, cut, rank, token, xxh3 = match.groups()
        return IndexKey(attempt=int(attempt), cut=int(cut), rank=int(rank), token=token, xxh3=xxh3)
    if match := _COMPACT_INDEX.fullmatch(key):
        return IndexKey(attempt=None, cut=None, rank=None, token=match[1], xxh3=match[2])
    raise CorruptObject("not an index's name", where=repr(key[:200]))


def is_index_key(key: str) -> bool:
    return _INDEX.fullmatch(key) is not None or _COMPACT_INDEX.fullmatch(key) is not None


def _check(**numbers: int) -> None:
    for name, limit in _LIMITS:
        if name in numbers and not 0 <= numbers[name] < limit:
            raise UserError(
                f"{name} {numbers[name]} does not fit its object name", remedy=f"0 <= {name} < {limit}"
            )


def _check_token(token: str) -> None:
    if _TOKEN.fullmatch(token) is None:
        raise UserError(
            f"{token!r} cannot be a process token", remedy=f"use keys.new_token(): {TOKEN_PATTERN}"
        )
