"""Checks that the objects of a checkpoint are still in the store.

Objects may be deleted from outside: by a lifecycle rule of the bucket, a cleaning script, or by hand. So the chain of a
save is checked before its commit: for a baseline, for the last save of a trainer, and if the last check is older than
`CHECK_INTERVAL_S`. Maintenance checks as well. No save builds on a checkpoint with missing objects: such a save fails
like an abandoned one, and the next one is a baseline. With one rank, a check is one LIST of `data/`. With several, each
rank checks the objects of its parts by HEAD, because a LIST would return those of all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.layout import layout_key
from deltashard_checkpoint.format.object_key import run_key, snapshot_prefix
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log.chain import chain, closure, prefixes_of
from deltashard_checkpoint.log.entry import Part, prefix_of
from deltashard_checkpoint.log.manifest import Manifests, manifest_key
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.checkpoint_reader import load_indexes
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store
from deltashard_checkpoint.stores.deadline import deadline
from deltashard_checkpoint.write.snapshot_reports import SnapshotAbandoned

from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger

CHECK_INTERVAL_S = 600.0


class ChainBroken(SnapshotAbandoned):
    """The checkpoint that a save builds on cannot be restored any more."""


class ChainWatch:
    """State of the checks of one run's chains. Thread-safe."""

    def __init__(self, store: Store, *, metrics: Metrics, log: Logger) -> None:
        self._store = store
        self._metrics = metrics
        self._log = log
        self._lock = threading.Lock()
        self._packs: dict[str, tuple[str, ...]] = {}
        """Pack keys by index key, relative to the run's root. An index never changes."""
        self._checked_s: dict[int, float] = {}
        self._broken_prefixes: frozenset[str] = frozenset()

    def record_packs(self, index_key: str, packs: Iterable[str]) -> None:
        """Record the packs of an index written by this process, so that a check need not read it."""
        with self._lock:
            self._packs[index_key] = tuple(packs)

    def is_broken(self, state: RunState, seq: int) -> bool:
        """Return whether objects of checkpoint `seq` are known to be missing, without a request to the store."""
        with self._lock:
            missing = self._broken_prefixes
        return bool(missing) and any(prefixes_of(state, each) & missing for each in closure(state, (seq,)))

    def is_check_due(self, rank: int) -> bool:
        """Return whether the rank's last check is too old to commit a differential without another one."""
        with self._lock:
            return time.monotonic() - self._checked_s.get(rank, -CHECK_INTERVAL_S) >= CHECK_INTERVAL_S

    def check(
        self,
        state: RunState,
        seq: int | None,
        *,
        manifests: Manifests,
        boxes: Iterable[Box] | None = None,
        rank: int = 0,
        single_rank: bool = True,
        extra_indexes: Mapping[str, Sequence[str]] = MappingProxyType({}),
        deadline_s: float,
    ) -> None:
        """Check the objects of `boxes` (None: all) of checkpoint `seq`, and the `extra_indexes` with their packs.

        Raises `ChainBroken` if an object is missing, and store errors.
        """
        try:
            with deadline(deadline_s):
                missing = self._missing(state, seq, extra_indexes, manifests, boxes, single_rank, deadline_s)
        except InvalidCheckpoint as error:  # a manifest, layout or index exists, but is damaged
            assert seq is not None
            missing = dict.fromkeys((error.where,), min(prefixes_of(state, seq)))
        with self._lock:
            self._checked_s[rank] = time.monotonic()
            known = {prefix for each in state.checkpoints for prefix in prefixes_of(state, each)}
            self._broken_prefixes = (self._broken_prefixes & known) | set(missing.values())
            known |= {prefix_of(key) for key in extra_indexes}
            self._packs = {key: packs for key, packs in self._packs.items() if prefix_of(key) in known}
        if not missing:
            return
        self._metrics.chain_broken.inc()
        first, count = min(missing), len(missing)
        self._log.error("chain.broken", seq=seq, missing=count, first=first)
        whose = "this save" if seq is None else f"the chain of checkpoint {seq}"
        what = f"{count} objects of {whose} are missing from the store or damaged, the first is {first}"
        remedy = "the next save is a baseline and builds on nothing. Find what deletes below data/: a script, a rule"
        raise ChainBroken(what, where=f"{self._store.url}/{state.run}", remedy=remedy)

    def _missing(
        self,
        state: RunState,
        seq: int | None,
        extra_indexes: Mapping[str, Sequence[str]],
        manifests: Manifests,
        boxes: Iterable[Box] | None,
        single_rank: bool,
        deadline_s: float,
    ) -> dict[str, str]:
        """Return missing objects, relative to the run's root, each with the prefix that needs it."""
        there = {info.key for info in self._store.list(run_key(state.run, "data/"))} if single_rank else set()

        def find_missing(wanted: Mapping[str, str]) -> dict[str, str]:
            return {
                key: prefix
                for key, prefix in wanted.items()
                if run_key(state.run, key) not in there and not self._is_there(run_key(state.run, key))
            }

        read = () if seq is None else closure(state, (seq,))
        documents: dict[str, str] = {}
        for entry in map(state.checkpoints.__getitem__, read):
            if (listed := entry.listed) is not None:
                keys = (
                    manifest_key(entry.attempt, entry.snapshot_id, listed.manifest),
                    layout_key(listed.layout),
                )
                documents |= dict.fromkeys(keys, snapshot_prefix(entry.attempt, entry.snapshot_id))
        if missing := find_missing(documents):
            return missing
        parts: tuple[Part, ...] = ()
        if seq is not None:
            links = chain(manifests.listing(state, read), seq, boxes, strict=False)
            parts = tuple(link.part for link in links)
        indexes = {key: prefix_of(key) for key in (*(part.index_key for part in parts), *extra_indexes)}
        if missing := find_missing(indexes):
            return missing
        with self._lock:
            packs = {**self._packs, **extra_indexes}
        unread = [part for part in parts if part.index_key not in packs]
        for key, index in load_indexes(self._store, state.run, unread, deadline_s=deadline_s).items():
            packs[key] = tuple(pack.key for pack in index.packs)
            self.record_packs(key, packs[key])
        return find_missing({pack: indexes[key] for key in indexes for pack in packs[key]})

    def _is_there(self, key: str) -> bool:
        """Return whether an object exists. A listing may be stale, so only a failed HEAD proves that it is missing."""
        try:
            self._store.head(key)
        except ObjectNotFound:
            return False
        return True
