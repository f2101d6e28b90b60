"""The rules of the log, each with a mutant that removes it.

A mutant patches the real code (or, for the rules that bind trainers, the model's trainer) so that one sentence of the
format page no longer holds. The model must then find a schedule that loses or mixes data: a rule whose removal has no
effect is either unnecessary or untested.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.log import chain as lineages
from deltashard_checkpoint.log import commit_log, folded_state, replay, run_state
from deltashard_checkpoint.log.entry import Retired, Sealed, entry_key
from deltashard_checkpoint.log.listing import Hint, Listing
from deltashard_checkpoint.log.manifest import Manifest
from deltashard_checkpoint.maintenance import garbage_collection, retention
from deltashard_checkpoint.stores.abc import ObjectExists, StoreUnavailable
from deltashard_checkpoint.write import attempt as attempts
from deltashard_checkpoint.write import commit, fencing, snapshot_reports

from tests.crash.log_model import MOVES, ModelRank, cells_of, run_schedule

BOUND = 3000
"""Number of schedules in which the model must find each mutant."""


class Mutant:
    """A removed rule: `patches` are (object, attribute, replacement).

    `weights` change the frequency of moves, for rules that few schedules depend on.
    """

    def __init__(self, rule: str, *patches: tuple[Any, str, Any], **weights: float) -> None:
        self.rule, self.patches, self.weights = rule, patches, weights


def find_violation(mutant: Mutant) -> tuple[int, str] | None:
    """Return (schedules until the model failed, its message); None when it never failed."""
    with ExitStack() as stack:
        for where, name, new in mutant.patches:
            stack.enter_context(mock.patch.object(where, name, new))
        stack.enter_context(mock.patch.dict(MOVES, mutant.weights))
        for seed in range(BOUND):
            try:
                run_schedule(seed)
            except Exception as error:
                return seed + 1, f"{type(error).__name__}: {error}"
    return None


# The log


def _overwrite(self: commit_log.RunLog, sealed: Any, retry_budget: Any) -> bool:
    while True:
        try:
            self.store.put(self.key(entry_key(sealed.entry.seq)), sealed.data)
        except StoreUnavailable:
            if not retry_budget.pause():
                raise
            continue
        return True


def _overwrite_on_retry(self: commit_log.RunLog, sealed: Any, retry_budget: Any) -> bool:
    try:
        self.store.put_if_absent(self.key(entry_key(sealed.entry.seq)), sealed.data)
    except ObjectExists:
        return bool(self._resolve_slot(sealed))
    except StoreUnavailable:
        return _overwrite(self, sealed, retry_budget)
    return True


_collect = garbage_collection.collect


def _collect_and_trim(log: commit_log.RunLog, **options: Any) -> garbage_collection.CollectResult:
    done = _collect(log, **options)
    live = [*log.state.checkpoints, log.state.tip]
    log.store.delete([log.key(entry_key(seq)) for seq in range(1, min(live))])
    return done


def _begin_at_hint(self: commit_log.RunLog, known: int) -> run_state.RunState:
    tip = max(self.hint().seq, known)
    if tip < 0 or self._exists(tip + 1):
        return _cold_read(self, known)
    return replay.fold(run_state.RunState(run=self.run), self._read(range(tip + 1)))


def _listed_by_get(self: commit_log.RunLog, first: int) -> Listing:
    tip = first - 1
    while self._exists(tip + 1):
        tip += 1
    return Listing(first=first, seqs=tuple(range(first, tip + 1)), folds=())


def _listed_to_the_gap(self: commit_log.RunLog, first: int) -> Listing:
    seen = _listed(self, first)
    seqs = tuple(seq for at, seq in enumerate(seen.seqs) if seq == first + at)
    return replace(seen, seqs=seqs)


_cold_read, _listed = commit_log.RunLog._cold_read, commit_log.RunLog.listed

# Covers


_chain = lineages.chain


def _rewired(rewire: Callable[[run_state.RunState, Any, Any], Any]) -> Callable[..., Any]:
    """Return `chain` over a state whose parts cover other rows than they declare."""

    def chain(state: run_state.RunState, seq: int, boxes: Any = None, *, strict: bool = True) -> Any:
        checkpoints = {
            s: replace(c, parts=tuple(replace(p, covers=rewire(state, c, p)) for p in c.parts))
            for s, c in state.checkpoints.items()
        }
        return _chain(replace(state, checkpoints=checkpoints), seq, boxes, strict=strict)

    return chain


def _log_order(state: run_state.RunState, entry: Any, part: Any) -> int | None:
    if part.covers is None:
        return None
    return max((seq for seq in state.checkpoints if seq < entry.seq), default=part.covers)


def _same_rank(state: run_state.RunState, seq: int, boxes: Any = None, *, strict: bool = True) -> Any:
    """Follow rank r of one checkpoint to rank r of the next, even if its boxes there differ."""
    links = []
    for part in lineages.parts_of(state, seq):
        at, here = seq, part
        while True:
            links.append(lineages.ChainLink(seq=at, part=here, boxes=part.boxes))
            if here.covers is None:
                break
            at = here.covers
            older = lineages.parts_of(state, at)
            here = older[min(part.rank, len(older) - 1)]
    return tuple(sorted(links, key=lambda link: -link.seq))


def _no_check(*_: Any) -> None:
    pass


def _drop_at_upload(self: ModelRank, job: Any) -> None:
    if job is self.jobs[-1]:
        self.fresh_pending = set()


_acknowledge = ModelRank.acknowledge


def _drop_base_at_any_commit(self: ModelRank, job: Any) -> None:
    _acknowledge(self, job)
    if job is self.jobs[-1]:
        self.base_pending = set()
        self.base = set(self.fresh)


def _no_reseed(self: ModelRank, seq: int, links: Any, cells: Any) -> None:
    mine = set(cells_of(self.boxes))
    roots = {link.seq for link in links if link.part.covers is None and mine & set(cells_of(link.boxes))}
    self.known_commit, self.known_base = seq, roots.pop() if len(roots) == 1 else None


def _late_acknowledge(self: ModelRank, job: Any) -> None:
    """Accept any acknowledgement, also one that arrives after the next snapshot."""
    job.acknowledged = True
    self.fresh_pending = set()
    self.known_commit = job.committed
    if job.full:
        self.base_pending = set()
        self.known_base = job.committed


_original_take_snapshot = ModelRank.take_snapshot


def _rebase_own_marks_only(self: ModelRank, snapshot_id: int, step: int, mode: str) -> Any:
    """Treat a snapshot in flight as committed when the newest commit becomes the baseline."""
    if mode == "rebased":
        self.known_base, mode = self.known_commit, "since_commit"
        self.base, self.base_pending = set(self.fresh), set()
    return _original_take_snapshot(self, snapshot_id, step, mode)


def _covers_of_rank_0(self: ModelRank, snapshot_id: int, step: int, mode: str) -> Any:
    """Use rank 0's `covers` for the whole snapshot, and each rank's own marks for its rows."""
    job = _original_take_snapshot(self, snapshot_id, step, mode)
    first = self.gang.ranks[0].jobs[-1]
    if job.covers is not None and first.covers is not None:
        job.covers = first.covers
    return job


# Fencing, committing, deleting


_validate_checkpoint = replay._validate_checkpoint


def _validate_without_fence(state: run_state.RunState, entry: Any) -> None:
    _validate_checkpoint(replace(state, attempt=entry.attempt), entry)


_existing_commit = commit._existing_commit


def _existing_in_any_order(snapshot: Any, state: run_state.RunState) -> Any:
    if entry := state.commit_of(snapshot.attempt, snapshot.snapshot_id):
        return commit.Committed(seq=entry.seq, entry=entry, by_us=False)
    if state.attempt is not None and state.attempt > snapshot.attempt:
        raise fencing.FencedError(snapshot.attempt, state.attempt, snapshot.log.run)
    return None


def _validate_in_any_order(state: run_state.RunState, entry: Any) -> None:
    opened = replace(state.attempts[entry.attempt], last_snapshot=None, last_step=None)
    _validate_checkpoint(replace(state, attempts={**state.attempts, entry.attempt: opened}), entry)


_append = commit_log.RunLog.append


def _append_chosen_early(self: commit_log.RunLog, build: Any, **options: Any) -> Any:
    """Choose an attempt's resume point once, before the slot is won."""
    if not options.get("voiding"):
        return _append(self, build, **options)
    early = self.refresh()
    return _append(self, lambda _state, seq, writer: build(early, seq, writer), **options)


def _closure_is_itself(state: run_state.RunState, seqs: Any) -> frozenset[int]:
    return frozenset(seq for seq in seqs if seq in state.checkpoints)


def _collect_unnamed(log: commit_log.RunLog, **options: Any) -> garbage_collection.CollectResult:
    """Delete every object that no live checkpoint reads, named or not."""
    done = _collect(log, **options)
    live = lineages.live_prefixes(log.state)
    log.store.delete(
        [info.key for prefix, info in garbage_collection.data_objects(log) if prefix not in live]
    )
    return done


_orphaned = garbage_collection.orphaned_prefixes


def _orphan_named_once(log: commit_log.RunLog, state: run_state.RunState, **options: Any) -> tuple[str, ...]:
    """Return orphaned prefixes that no retire entry of the log has named before."""
    slots = [log.read_slot(seq) for seq in range(state.tip + 1)]
    entries = [slot.entry for slot in slots if isinstance(slot, Sealed)]
    once = {prefix for entry in entries if isinstance(entry, Retired) for prefix in entry.prefixes}
    return tuple(prefix for prefix in _orphaned(log, state, **options) if prefix not in once)


# Manual operations


_apply_rewind = replay._apply_rewind


_committed_pins = property(
    lambda self: {name: seq for seq, entry in self.checkpoints.items() for name in entry.pins}
)


_dump = folded_state.dump


# Many ranks


class _AnyStep(int):
    """A step that is equal to every other step."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


_report_named = snapshot_reports.parse_report_name
_object_put = commit.put_idempotent
_manifest_listed: Any = Manifest.listed
_layout_boxes_of = Layout.boxes_of


def _named_at_any_step(text: str) -> Any:
    found = _report_named(text)
    return None if found is None else replace(found, step=_AnyStep(found.step))


def _put_no_manifest(log: Any, key: str, data: bytes, retry_budget: Any) -> None:
    if not key.endswith(".manifest"):
        _object_put(log, key, data, retry_budget)


_listed_as_baseline = property(lambda self: replace(_manifest_listed.fget(self), covers=(None,)))


MUTANTS = (
    Mutant("log entries are created only if absent", (commit_log.RunLog, "_create", _overwrite)),
    Mutant("log entries are never changed", (commit_log.RunLog, "_create", _overwrite_on_retry)),
    Mutant("log entries are never deleted", (garbage_collection, "collect", _collect_and_trim)),
    Mutant(
        "HINT is only the start-after of a LIST: the tip is what a LIST shows",
        (commit_log.RunLog, "_cold_read", _begin_at_hint), hide=3, hint=5,
    ),
    Mutant(
        "a 404 never proves the tip", (commit_log.RunLog, "listed", _listed_by_get),
        (commit_log.RunLog, "hint", lambda _: Hint()),
    ),
    Mutant(
        "a gap is an error", (commit_log.RunLog, "listed", _listed_to_the_gap),
        (commit_log.RunLog, "hint", lambda _: Hint()),
    ),
    Mutant(
        "an attempt is opened late only if a restore would still load what was loaded",
        (attempts.ResumeBasis, "check", lambda *_: None), open=6,
    ),
    Mutant("restore follows covers, never mere log order", (lineages, "chain", _rewired(_log_order))),
    Mutant("restore follows covers per part", (lineages, "chain", _rewired(lambda state, entry, part: entry.parts[0].covers))),
    Mutant("restore follows covers box by box", (lineages, "chain", _same_rank)),
    Mutant(
        "a commit whose covers is not live in its lineage at its slot is abandoned",
        (replay, "_validate_covers", _no_check),
    ),
    Mutant(
        "a consecutive delta drops its bits when its own commit is known", (ModelRank, "staged", _drop_at_upload)
    ),
    Mutant(
        "one-shot and intermittent drop theirs only when a baseline's commit is known",
        (ModelRank, "acknowledge", _drop_base_at_any_commit),
    ),
    Mutant(
        "a snapshot taken while another is in flight includes that one's bits",
        (ModelRank, "since_commit", lambda self: set(self.fresh)),
    ),
    Mutant("a restore re-seeds bits from the delta frames it used", (ModelRank, "reseed", _no_reseed)),
    Mutant(
        "ranks may learn of a commit at different times, or never (a late acknowledgement drops newer bits)",
        (ModelRank, "acknowledge", _late_acknowledge),
    ),
    Mutant(
        "rows changed since the newest commit replace all rows changed since the baseline",
        (ModelRank, "take_snapshot", _rebase_own_marks_only),
    ),
    Mutant(
        "ranks may learn of a commit at different times, or never (covers is each rank's own)",
        (ModelRank, "take_snapshot", _covers_of_rank_0), late=6,
    ),
    Mutant(
        "an older attempt that tries to commit gets FencedError",
        (replay, "_validate_checkpoint", _validate_without_fence), (commit, "_existing_commit", lambda snapshot, state: _existing_commit(snapshot, replace(state, attempt=snapshot.attempt))),
    ),
    Mutant(
        "an opener that loses the slot to a zombie's commit resumes from that commit",
        (commit_log.RunLog, "append", _append_chosen_early), open=10,
    ),
    Mutant(
        "snapshots commit in increasing order", (replay, "_validate_checkpoint", _validate_in_any_order),
        (commit, "_existing_commit", _existing_in_any_order),
    ),
    Mutant(
        "the live set is closed over covers", (retention, "closure", _closure_is_itself),
        (replay.chain, "closure", _closure_is_itself),
    ),
    Mutant(
        "the newest attempt's resume point is not retired before that attempt's first commit",
        (run_state.RunState, "resuming_from", _no_check), open=8, maintenance=20, stall=0,
    ),
    Mutant(
        "an uncommitted snapshot is named only when a higher attempt or an equal or later snapshot is in the log, "
        "and an entry that references a retired prefix is refused",
        (replay, "is_uncommittable", lambda *_: True),
        (retention, "is_uncommittable", lambda *_: True),
        (garbage_collection, "is_uncommittable", lambda *_: True),
        (replay, "_validate_prefixes", _no_check),
    ),
    Mutant(
        "gc deletes only prefixes named by a retire entry", (garbage_collection, "collect", _collect_unnamed)
    ),
    Mutant(
        "a compaction that began before a forgotten one is refused", (replay, "_validate_start_slot", _no_check),
        stall=5,
    ),
    Mutant(
        "an object under a forgotten prefix is orphaned, and named again",
        (garbage_collection, "orphaned_prefixes", _orphan_named_once),
    ),
    Mutant(
        "a rewind fences every attempt before it", (replay, "_apply_rewind", lambda state, entry: replace(_apply_rewind(state, entry), attempt=state.attempt, attempts=state.attempts)), rewind=4
    ),
    Mutant(
        "checkpoints after the target of a rewind are detached",
        (replay, "_apply_rewind", lambda state, entry: replace(_apply_rewind(state, entry), detached=frozenset())),
    ),
    Mutant(
        "a rewind to a detached checkpoint attaches its lineage again",
        (replay, "_apply_rewind", lambda state, entry: replace(_apply_rewind(state, entry), detached=_apply_rewind(state, entry).detached | state.detached)), rewind=4,
    ),
    Mutant(
        "the newest commit or user entry decides a pinned name, and retention keeps its checkpoint",
        (run_state.RunState, "pinned", _committed_pins),
    ),
    Mutant(
        "a folded state has the user entries", (folded_state, "dump", lambda state: _dump(replace(state, user_entries={}, detached=frozenset()))), pin=4, rewind=2
    ),
    Mutant(
        "ranks with snapshots of different steps make no checkpoint",
        (snapshot_reports, "parse_report_name", _named_at_any_step), snapshot_id=20, open=6,
    ),
    Mutant(
        "the boxes of all ranks tile every table, checked before the attempt's entry",
        (Layout, "check_tiling", _no_check), open=8,
    ),
    Mutant(
        "an entry names only what is durable: a layout is put before its attempt",
        (attempts, "_put_layout", _no_check),
    ),
    Mutant(
        "an entry names only what is durable: a manifest is put before its checkpoint",
        (commit, "put_idempotent", _put_no_manifest),
    ),
    Mutant(
        "an entry has its parts' covers, so that rules are checked without a manifest",
        (Manifest, "listed", _listed_as_baseline),
    ),
    Mutant(
        "the part of a rank has the boxes of that rank in the layout",
        (Layout, "boxes_of", lambda self, rank: _layout_boxes_of(self, (rank + 1) % self.world_size)),
    ),
)  # fmt: skip
