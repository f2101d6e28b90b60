"""Names of a run's data objects. Only this module builds and parses them.

    data/{attempt:020d}/{snapshot_id:08d}/{rank:05d}-{token}-{n:05d}.pack      frames of one rank of one snapshot
    data/{attempt:020d}/{snapshot_id:08d}/{rank:05d}-{token}-s{n:05d}.pack     their tails: optimizer state
    data/{attempt:020d}/{snapshot_id:08d}/{rank:05d}-{token}-{xxh3}.index      their index; the name contains its hash
    data/compact-{token}/{n:05d}.pack, s{n:05d}.pack and {xxh3}.index   the same for a compaction

A compaction's token contains the log slot at which it began (`compaction_token`). The log's state then decides whether
it may still be committed, as an attempt's number does for snapshots.

All names are relative to the run's root; `run_key` makes a store key. Zero padding makes the store's listing order the
numeric order. `token` is random per process, so a restarted process never confuses an older process' object with its
own.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from deltashard_checkpoint.errors import CorruptObject, UserError

TOKEN_PATTERN = r"[0-9a-z]{8,32}"  # noqa: S105 - a name, not a secret
RESERVED = frozenset({"cache", "closing", "data", "layout", "log", "probe"})
"""Folder names inside a run. A run with such a name would be mixed with the objects of its parent run."""
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
_LIMITS = (("attempt", 10**20), ("snapshot_id", 10**8), ("rank", 10**5), ("n", 10**5))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackKey:
    """A parsed pack name. `attempt`, `snapshot_id` and `rank` are None for a compaction's pack."""

    attempt: int | None
    snapshot_id: int | None
    rank: int | None
    token: str
    n: int
    state: bool
    """Whether it holds tails instead of frames; packs of both kinds are numbered separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKey:
    """A parsed index name. `attempt`, `snapshot_id` and `rank` are None for a compaction's index."""

    attempt: int | None
    snapshot_id: int | None
    rank: int | None
    token: str
    xxh3: str
    """xxh3-128 of the index's bytes, 32 hexadecimal digits."""


def new_token() -> str:
    """Return a new random token: 64 bits, 16 hexadecimal digits."""
    return secrets.token_hex(8)


def compaction_token(slot: int) -> str:
    """Return a new token for a compaction that begins when `slot` is the last slot of the log."""
    return f"{slot:015d}x{new_token()}"


def compaction_slot(prefix: str) -> int | None:
    """Return the slot at which a prefix's compaction began; None for a snapshot's prefix, or if the name lacks it."""
    match = _BEGUN.fullmatch(prefix)
    return int(match[1]) if match else None


def run_key(run: str, key: str) -> str:
    """Return the store key of `key`, which is relative to the root of `run`."""
    return f"{run}/{key}"


def validate_run(run: str) -> str:
    """Return `run` if it is a valid name: '/'-separated parts of letters, digits, '.', '_', '-'; else `UserError`."""
    if len(run) > 512 or _RUN.fullmatch(run) is None:
        raise UserError(
            f"{run!r} cannot name a run",
            remedy="use letters, digits, '.', '_', '-', in parts separated by '/'; no part begins with '.' or '-'",
        )
    return run


def validate_new_run(run: str) -> str:
    """Return `run` if a new run may have this name; else `UserError`. Existing runs of other names stay readable."""
    if taken := reserved(run):
        raise UserError(
            f"{run!r} cannot name a new run: {taken!r} is a folder that every run has",
            remedy=f"use another name; reserved are: {', '.join(sorted(RESERVED))}",
        )
    return validate_run(run)


def reserved(run: str) -> str | None:
    """Return the part of a run's name that is a folder of its parent run, or None.

    The first of several parts may be any name: it is a namespace, with no parent run in this store.
    """
    first, *inner = run.split("/")
    return next((part for part in inner or [first] if part in RESERVED), None)


def snapshot_prefix(attempt: int, snapshot_id: int) -> str:
    """Return the common prefix of all data objects of one snapshot, as named by retire entries."""
    _check(attempt=attempt, snapshot_id=snapshot_id)
    return f"data/{attempt:020d}/{snapshot_id:08d}/"


def compaction_prefix(token: str) -> str:
    _check_token(token)
    return f"data/compact-{token}/"


def pack_key(*, attempt: int, snapshot_id: int, rank: int, token: str, n: int, state: bool = False) -> str:
    """Return the key of the n-th pack of frames of a rank's part, or (`state`) of their tails."""
    _check(rank=rank, n=n)
    _check_token(token)
    return f"{snapshot_prefix(attempt, snapshot_id)}{rank:05d}-{token}-{'s' if state else ''}{n:05d}.pack"


def index_key(*, attempt: int, snapshot_id: int, rank: int, token: str, xxh3: str) -> str:
    """Return the key of a rank's index of a snapshot; `xxh3` is the hex xxh3-128 of its bytes."""
    _check(rank=rank)
    _check_token(token)
    return f"{snapshot_prefix(attempt, snapshot_id)}{rank:05d}-{token}-{xxh3}.index"


def compaction_pack_key(*, token: str, n: int, state: bool = False) -> str:
    _check(n=n)
    return f"{compaction_prefix(token)}{'s' if state else ''}{n:05d}.pack"


def compaction_index_key(*, token: str, xxh3: str) -> str:
    """Return the key of a compaction's index; `xxh3` is the hex xxh3-128 of its bytes."""
    return f"{compaction_prefix(token)}{xxh3}.index"


def parse_pack_key(key: str) -> PackKey:
    """Parse a pack's key; raises `CorruptObject` for any other key."""
    if match := _PACK.fullmatch(key):
        attempt, snapshot_id, rank, token, state, n = match.groups()
        return PackKey(
            attempt=int(attempt),
            snapshot_id=int(snapshot_id),
            rank=int(rank),
            token=token,
            n=int(n),
            state=bool(state),
        )
    if match := _COMPACT_PACK.fullmatch(key):
        token, state, n = match.groups()
        return PackKey(attempt=None, snapshot_id=None, rank=None, token=token, n=int(n), state=bool(state))
    raise CorruptObject("not a pack's name", where=repr(key[:200]))


def parse_index_key(key: str) -> IndexKey:
    """Parse an index's key; raises `CorruptObject` for any other key."""
    if match := _INDEX.fullmatch(key):
        attempt, snapshot_id, rank, token, xxh3 = match.groups()
        return IndexKey(
            attempt=int(attempt), snapshot_id=int(snapshot_id), rank=int(rank), token=token, xxh3=xxh3
        )
    if match := _COMPACT_INDEX.fullmatch(key):
        return IndexKey(attempt=None, snapshot_id=None, rank=None, token=match[1], xxh3=match[2])
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
            f"{token!r} cannot be a process token", remedy=f"use object_key.new_token(): {TOKEN_PATTERN}"
        )
