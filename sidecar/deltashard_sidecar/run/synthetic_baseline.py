"""Synthetic baselines of a sidecar: what is in its cache, and what its settings allow.

The rule is in `maintenance.synthetic`; this module makes no request to the store.
"""

from __future__ import annotations

import itertools

from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.format.object_key import compaction_pack_key, pack_key, parse_index_key, run_key
from deltashard_checkpoint.log.chain import chain
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance import synthetic
from deltashard_checkpoint.maintenance.compaction import compactable
from deltashard_checkpoint.vocabulary import COVERS_NEWEST
from deltashard_checkpoint.write.differential import History
from deltashard_checkpoint.write.part_writer import pack_size
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.settings import Settings


class SyntheticBaselines:
    """Decides on synthetic baselines of one run. Thread-safe."""

    def __init__(self, settings: Settings, cache: PackCache) -> None:
        self._settings = settings
        self._cache = cache

    @property
    def on(self) -> bool:
        """Whether a save may leave a baseline to compaction, for which maintenance must be on."""
        return self._settings.synthetic_baselines and self._settings.maintenance_interval_s >= 0

    def at_snapshot(
        self, state: RunState, commit: int, history: History, policy: pb.Policy
    ) -> synthetic.BaselineVerdict | None:
        """Return why a save due as a baseline covers `commit`, its trainer's newest, instead; None: it does not."""
        if not self.on or policy.differential in COVERS_NEWEST or not compactable(state, commit):
            return None
        found = synthetic.compaction_inputs(state, commit, self._cached_bytes(state, commit))
        if found.checkpoints > 2:
            return None  # an earlier compaction is still outstanding: it failed, or takes too long
        full = synthetic.FullSnapshot(
            raw_bytes=history.raw_bytes,
            stored_bytes=history.full_bytes,
            stall_s=_full_stall_s(state, commit, history),
        )
        return synthetic.at_snapshot(found, full)

    def between_snapshots(
        self, state: RunState, newest: int, policy: pb.Policy
    ) -> tuple[int, synthetic.BaselineVerdict] | None:
        deferred = self.on and policy.differential not in COVERS_NEWEST
        seq = synthetic.compaction_target(state, newest, consecutive=not deferred)
        if not compactable(state, seq):
            return None
        checkpoints = len(synthetic.checkpoints_of(state, seq))
        verdict = synthetic.between_snapshots(
            checkpoints, deferred=deferred, longest=self._settings.compact_after
        )
        return None if verdict is None else (seq, verdict)

    def _cached_bytes(self, state: RunState, seq: int) -> int:
        """Return the cached bytes of the chain's packs. Packs of a writer with smaller ones may be left out."""
        found = 0
        for part in {link.part for link in chain(state, seq)}:
            key = parse_index_key(part.index_key)
            most = part.stored_bytes // pack_size(self._settings.pack_bytes, self._cache) + 2
            for n, kind in itertools.product(range(most), (False, True)):
                name = compaction_pack_key(token=key.token, n=n, state=kind)
                if key.attempt is not None and key.snapshot_id is not None and key.rank is not None:
                    of = {"attempt": key.attempt, "snapshot_id": key.snapshot_id, "rank": key.rank}
                    name = pack_key(**of, token=key.token, n=n, state=kind)
                found += self._cache.bytes_of(run_key(state.run, name))
        return found


def _full_stall_s(state: RunState, commit: int, history: History) -> float:
    """Return the stall in seconds of a save of all rows: the baseline's, or scaled from the newest commit's."""
    base = None if history.baseline is None else state.checkpoints.get(history.baseline)
    if base is not None and base.baseline:
        return base.stall_s
    entry = state.checkpoints[commit]
    return entry.stall_s * history.raw_bytes / max(1, entry.raw_bytes)
