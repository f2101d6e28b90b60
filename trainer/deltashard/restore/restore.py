"""Restore into the living model: tables in place, frame by frame; everything else last; nothing half done is kept.

    blobs     come first in the one stream; decoded, and checked against the program before a byte of the model changes
    rows      every frame is decoded and scattered straight into the parameter and the optimizer's row state (views of
              their memory; tables on an accelerator go through a staging copy), newest frame first
    dense     parameters, buffers, optimizers, the user's state, loader, generators, step: only after all rows arrived

Parameters are copied in place and never re-bound. Optimizer state lands in memory of its own with its saved type.
A table the checkpoint does not know, grown, shrunk or missing tables are refused unless `strict=False`, which says
what it did in `Restored.notes`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import torch
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.index import box_message, box_of
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from deltashard_proto.cause import Cause, heard
from deltashard_proto.v1 import trainer_pb2 as pb
from torch import Tensor

from deltashard.attach.session import Link, translate
from deltashard.errors import CheckpointMismatch, RestoreFailed, RunWentOn
from deltashard.optimizer.optimizer_state import OptimizerView
from deltashard.program import Program
from deltashard.state import contract
from deltashard.state.origin import grow, may_grow
from deltashard.state.value import copy_tensor, decode_value
from deltashard.tracking.tracking import TrackedTable, Tracking

RESTORE_DEADLINE_S = 6 * 3600.0
DRAIN_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `restore()` brought back."""

    step: int
    """Training goes on after this step."""
    seq: int
    """Number of the checkpoint in the commit log."""
    attempt: int
    """The attempt that this process trains under."""
    source: str
    """"cache": every byte came from this machine; "store": at least one did not."""
    lost_steps: int | None
    """Steps the lost trainer had done beyond this one; None when nobody saw them (another machine)."""
    seconds: float
    """From the call to the model being whole."""
    stored_bytes: int
    """Bytes read, as stored."""
    chain: tuple[int, ...]
    """Checkpoints whose frames were used, newest first."""
    fell_back: bool
    """A newer checkpoint exists but is not whole, or may have been lost with a damaged log: see `notes`."""
    notes: tuple[str, ...] = ()
    """Entries lost with the log, what did not match and was let pass (`strict=False`), what differs of this process."""
    exact: bool | None = None
    """Whether content hashes taken at the cut equal those of the restored state; None: none were recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What one restore read, and from where."""

    blobs: Blobs
    chain: tuple[int, ...]
    baseline_seq: int | None
    cache_bytes: int
    store_bytes: int


def read_frames(
    link: Link, want: pb.RestoreRequest.Want, take: Callable[[memoryview, pb.RestoreReply.Filled], None]
) -> tuple[pb.RestoreReply.Plan, pb.RestoreReply.Done]:
    """Run one Restore call; `take` gets every frame's bytes, valid only during the call.

    Raises:
        InvalidCheckpoint: the checkpoint's bytes are wrong or gone for sure: fall back.
        RestoreFailed: the store or the sidecar failed.
        FencedError: a newer attempt runs.
    """
    out: queue.SimpleQueue[pb.RestoreRequest | None] = queue.SimpleQueue()
    out.put(pb.RestoreRequest(want=want))
    call = link.stub.Restore(iter(out.get, None), timeout=RESTORE_DEADLINE_S)
    plan = pb.RestoreReply.Plan()
    try:
        for reply in call:
            kind = reply.WhichOneof("kind")
            if kind == "plan":
                plan = reply.plan
            elif kind == "filled":
                filled = reply.filled
                block = link.arena.block(filled.block)
                take(block[filled.offset : filled.offset + filled.frame.length], filled)
                if filled.last:
                    out.put(pb.RestoreRequest(freed=pb.RestoreRequest.Freed(blocks=[filled.block])))
            elif kind == "done":
                return plan, reply.done
            elif kind == "failed":
                cause = heard(reply.failed)
                if cause == Cause.INVALID:
                    raise InvalidCheckpoint(reply.failed.message, where=f"checkpoint {want.seq}")
                if cause == Cause.MISMATCH:
                    raise CheckpointMismatch(reply.failed.message, where=f"checkpoint {want.seq}")
                raised = RunWentOn if cause == Cause.MOVED else RestoreFailed
                raise raised(
                    f"{cause}: {reply.failed.message}",
                    where=f"checkpoint {want.seq}",
                    remedy="the checkpoint is not lost: call restore() again once the store can be reached",
                )
    except grpc.RpcError as error:
        raise translate(error, where="restore", fallback=RestoreFailed) from None
    finally:
        # Half-close, then read to the end: that is our word that no block is looked at any more.
        out.put(None)
        _drain(call)
    raise RestoreFailed("the sidecar ended the restore without a word", where=f"checkpoint {want.seq}")


def _drain(call: Any) -> None:
    timer = threading.Timer(DRAIN_DEADLINE_S, call.cancel)
    timer.daemon = True
    timer.start()
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass  # whoever called has its result, or its error, already
    finally:
        timer.cancel()


def read_checkpoint(
    link: Link,
    seq: int,
    from_run: str,
    targets: ModelTargets,
    judge: Callable[[Mapping[str, memoryview]], Blobs],
) -> Received:
    """Read a checkpoint in one stream: blobs, then rows, which are scattered into the targets.

    `judge` gets the blobs, whole, while rows are on their way already, and before a byte of the model changes: it
    places the targets, or raises. Raises as `read_frames` does, or for rows and blobs that never came.
    """
    want = pb.RestoreRequest.Want(
        session=link.session,
        seq=seq,
        boxes=[box_message(box) for box in targets.boxes],
        blobs=True,
        from_run=from_run,
        mapping=targets.renames,
        # What fits is judged here, where lazily created optimizer state is known; `finish` insists on every row.
        lenient=True,
        weights_only=targets.weights_only,
    )
    arrivals = Arrivals(targets, judge)
    plan, done = read_frames(link, want, arrivals.take)
    blobs = arrivals.finish(plan)
    rows = bool(targets.placed)
    return Received(
        blobs=blobs,
        chain=tuple(plan.chain) if rows else (seq,),
        baseline_seq=(done.baseline_seq or None) if rows else seq,
        cache_bytes=done.cache_bytes,
        store_bytes=done.store_bytes,
    )


class Arrivals:
    """The frames of one restore: blobs until they are judged, then rows."""

    def __init__(self, targets: ModelTargets, judge: Callable[[Mapping[str, memoryview]], Blobs]) -> None:
        self._targets = targets
        self._judge = judge
        self._dense = FrameApplier([])
        self._blobs: Blobs | None = None

    def take(self, frame: memoryview, filled: pb.RestoreReply.Filled) -> None:
        """Apply one frame."""
        if not filled.HasField("table"):
            self._dense.apply(frame)
            return
        if self._blobs is None:
            if not filled.after_blobs:
                raise RestoreFailed(
                    "the sidecar sends rows before the dense state: it is older than this library",
                    where="restore",
                    remedy="update the sidecar (the operator's image) to this library's version",
                )
            self._begin_rows()
        self._rows(frame, filled)

    def finish(self, plan: pb.RestoreReply.Plan) -> Blobs:
        """Everything was sent: insist that nothing lacks."""
        blobs = self._begin_rows() if self._blobs is None else self._blobs
        targets = self._targets
        self._applier.finish(initial=[] if targets.strict else [box_of(box) for box in plan.initial])
        targets.notes += [note for note in self._applier.notes if note not in targets.notes]
        targets.finish()
        return blobs

    def _begin_rows(self) -> Blobs:
        self._dense.finish(blobs=("rng", "meta"))
        self._blobs = self._judge(self._dense.blobs)
        targets = self._targets
        self._applier = FrameApplier(
            [placed.target for placed in targets.placed], mapping=targets.renames, strict=targets.strict
        )
        self._rows = targets.taker(self._applier)
        return self._blobs


def array_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as the format's carrier type."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _in_place(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and (
        tensor.dim() == 1 or tensor.stride(1) == 1 or tensor.shape[1] == 1
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Placed:
    """One table under restore."""

    table: TrackedTable
    target: TableTarget
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(staging, live): what to copy when all rows are there."""
    from_deltas: np.ndarray[Any, np.dtype[np.bool_]]
    """Rows that came from delta frames."""


def _differences(table: TrackedTable, held: TableSchema, *, strict: bool) -> list[str]:
    """How a table differs from what is stored; unless `strict`, with what becomes of it.

    Raises:
        CheckpointMismatch: with `strict`, rows of another width, which cannot be taken at all.
    """
    rows, columns = table.param.shape
    was = f"[{held.rows}, {held.columns}]"
    now = f"[{rows}, {columns}]"
    if held.columns != columns and not strict:
        return [
            f"table {table.fqn} has other columns: {was} is stored, the model has {now}; it stays initial"
        ]
    if held.columns != columns:
        raise CheckpointMismatch(
            f"table {table.fqn} has other columns: {was} is stored, the model has {now}",
            where="tables",
            remedy=f"build it with {held.columns} columns as it was, or restore(strict=False), which leaves it initial",
        )
    found = []
    if held.rows != rows:
        change = "grew" if held.rows < rows else "shrank"
        fate = (
            "the new rows keep their initial values" if held.rows < rows else "the rows beyond are left out"
        )
        found.append((f"table {table.fqn} {change}: {was} is stored, the model has {now}", fate))
    if held.dtype != table.schema.dtype:
        types = f"{held.dtype} {was} is stored, the model has {table.schema.dtype} {now}"
        found.append((f"table {table.fqn} has another type: {types}", "values are converted"))
    return [what if strict else f"{what}; {fate}" for what, fate in found]


def _box(table: TrackedTable, held: TableSchema) -> Box:
    """The rows that both the model and the checkpoint have."""
    rows = min(held.rows, table.param.shape[0])
    return Box(table=table.fqn, row_start=0, row_stop=rows, col_start=0, col_stop=held.columns)


class ModelTargets:
    """The model's tables as targets of a restore, after they were compared with what is stored."""

    def __init__(
        self,
        tracking: Tracking,
        stored: Sequence[TableSchema],
        *,
        strict: bool,
        weights_only: bool,
        renames: Mapping[str, str],
    ) -> None:
        """`renames` gives the stored name of a table by the model's name for it.

        Raises:
            CheckpointMismatch: tables differ in a way that is not allowed.
        """
        self.notes: list[str] = []
        self.placed: list[_Placed] = []
        """Nothing before `place`."""
        self.renames = dict(renames)
        self.strict = strict
        self.weights_only = weights_only
        by_name = {schema.fqn: schema for schema in stored}
        named = {renames.get(table.fqn, table.fqn): table for table in tracking.tables}
        faults = [f"table {fqn} is stored, the model has none" for fqn in by_name.keys() - named.keys()]
        self._tables: list[tuple[TrackedTable, TableSchema]] = []
        for fqn, table in named.items():
            held = by_name.get(fqn)
            if held is None:
                faults.append(
                    f"table {table.fqn} is not stored" + ("" if strict else ": it keeps its initial values")
                )
                continue
            faults += _differences(table, held, strict=strict)
            if held.columns == table.param.shape[1]:
                self._tables.append((table, held))
        if faults and strict:
            raise CheckpointMismatch(
                "; ".join(faults),
                where="tables",
                remedy="build the tables as they were, or restore(strict=False) to take what fits (values are "
                "converted, other rows stay initial); renames={'new': 'stored'} maps names",
            )
        self.notes += faults
        # A delta says its tables' names: what it covers must have stored them under the same.
        self._alike = not faults and all(table.fqn == held.fqn for table, held in self._tables)

    @property
    def boxes(self) -> list[Box]:
        """What of the tables is wanted."""
        return [_box(table, held) for table, held in self._tables]

    def place(self, strangers: Collection[int]) -> None:
        """Make room for rows and their optimizer state.

        `strangers` are the optimizers that were others when this was stored: they get no row state of those.
        """
        for table, held in self._tables:
            self.placed.append(self._place(table, held, frozenset(strangers)))

    def taker(self, applier: FrameApplier) -> Callable[[memoryview, pb.RestoreReply.Filled], None]:
        """The consumer of frames: decode, scatter, note what came from deltas."""
        by_target = {id(p.target): p for p in self.placed}
        first = True

        def take(frame: memoryview, filled: pb.RestoreReply.Filled) -> None:
            nonlocal first
            for applied in applier.apply(frame):
                if not filled.baseline:
                    placed = by_target[id(applied.target)]
                    placed.from_deltas[applied.rows - placed.target.box.row_start] = True
            if first:
                first = False
                crash_point("restore.first_applied")

        return take

    def finish(self) -> None:
        """All rows arrived: copy what was staged for other devices."""
        with torch.no_grad():
            for placed in self.placed:
                for staging, live in placed.copies:
                    live.copy_(staging.view(live.shape))

    @property
    def complete(self) -> bool:
        """Whether every row and row field of the model is stored: a delta may follow. Ask when all is applied."""
        return self._alike and all(
            p.table.state_tensors().keys() <= p.target.fields.keys() for p in self.placed
        )

    def covers(self, other: ModelTargets) -> list[str]:
        """Tables of which `other` may have written more than this one will."""
        mine = {box.table: box.row_stop for box in self.boxes}
        return [p.table.fqn for p in other.placed if mine.get(p.table.fqn, 0) < p.target.box.row_stop]

    def _place(self, table: TrackedTable, held: TableSchema, strangers: Collection[int]) -> _Placed:
        box = _box(table, held)
        rows = box.row_stop
        copies: list[tuple[Tensor, Tensor]] = []
        weights = self._memory(table.param, rows, copies)
        fields: dict[str, np.ndarray[Any, Any]] = {}
        specs: list[FieldSpec] = []
        for spec in () if self.weights_only else held.fields:
            if not table.views and not self.strict:
                self.notes.append(f"{table.fqn}: no optimizer owns its stored state {spec.name}")
                continue
            if (owner := table.owner_of(spec)) is not None and owner.index in strangers:
                continue
            live = table.allocate_state(spec)
            specs.append(spec)
            fields[spec.name] = self._memory(
                live.reshape(-1) if spec.kind == "rowwise" and live.is_contiguous() else live, rows, copies
            ).reshape((rows,) if spec.kind == "rowwise" else (rows, held.columns))
        schema = TableSchema(
            fqn=table.fqn,
            rows=table.param.shape[0],
            columns=held.columns,
            dtype=table.schema.dtype,
            fields=tuple(specs),
        )
        return _Placed(
            table=table,
            target=TableTarget(schema=schema, box=box, weights=weights, fields=fields),
            copies=copies,
            from_deltas=np.zeros(rows, np.bool_),
        )

    @staticmethod
    def _memory(live: Tensor, rows: int, copies: list[tuple[Tensor, Tensor]]) -> np.ndarray[Any, Any]:
        part = live.detach()[:rows]
        if _in_place(part):
            return array_of(part)
        staging = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        copies.append((staging, part))
        return array_of(staging)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blobs:
    """The dense half of a checkpoint, decoded but not applied."""

    dense: dict[str, Tensor]
    optimizers: dict[int, Any]
    state: dict[str, Any]
    rng: Any
    loaders: dict[str, Any]
    meta: dict[str, Any]

    @classmethod
    def decode(cls, raw: Mapping[str, memoryview]) -> Blobs:
        """From the assembled blobs; accelerator tensors stay on the CPU until they are copied to their place."""
        found: dict[str, dict[Any, Any]] = {"dense": {}, "optim": {}, "state": {}}
        single: dict[str, Any] = {"rng": None, "loader": {}, "meta": {}}
        for name, data in raw.items():
            value = decode_value(data)
            kind, _, key = name.partition("/")
            if kind in found and key:
                found[kind][int(key) if kind == "optim" else key] = value
            else:
                single[name] = value
        return cls(
            dense=found["dense"],
            optimizers=found["optim"],
            state=found["state"],
            rng=single["rng"],
            loaders=single["loader"],
            meta=single["meta"],
        )

    def check(self, program: Program, *, strict: bool, weights_only: bool) -> list[str]:
        """Compare with the program before anything is changed; returns notes.

        Raises:
            CheckpointMismatch: with `strict`, anything that is missing, extra or of another shape or class.
        """
        faults: list[str] = []
        notes: list[str] = []
        tracking = program.tracking
        names = [source.name for source in program.sources]
        live = tracking.dense()
        saved = self._saved(tracking)
        keeps = "" if strict else ": it keeps its initial values"
        for name in sorted(saved.keys() | live.keys()):
            if name not in saved:
                faults.append(f"dense tensor {name} is not stored{keeps}")
            elif self._may_grow(tracking, name, saved[name], live.get(name)):
                continue
            elif name not in live:
                faults.append(f"dense tensor {name} is stored, the model has none")
            elif not _fits(saved[name], live[name]):
                faults.append(
                    f"dense tensor {name} is stored as {saved[name].dtype} {tuple(saved[name].shape)}, "
                    f"the model has {live[name].dtype} {tuple(live[name].shape)}{keeps}"
                )
        if not weights_only:
            if len(self.optimizers) != len(tracking.optimizers):
                faults.append(
                    f"{len(self.optimizers)} optimizers are stored, there are {len(tracking.optimizers)}"
                )
            for i, view in enumerate(tracking.optimizers):
                if (misfit := self._misfit(i, view)) is not None:
                    fate = "" if strict else ": it starts with no state of the checkpoint's"
                    faults.append(f"optimizer {i} {misfit} now{fate}")
            for i, view in enumerate(tracking.optimizers):
                faults += [
                    f"optimizer {i} has another shape of {name} than is stored{keeps}"
                    for name in self._misshapen(i, view)
                ]
            older = contract.unsaid(names, self.state, self.meta)
            notes += [f"{_place_of(name)} is not stored: an older version saved this" for name in older]
            for name in sorted((set(names) ^ self.state.keys()) - set(older)):
                what = "not stored" if name in names else "stored, but not given now"
                faults.append(f"{_place_of(name)} is {what}")
        if faults and strict:
            raise CheckpointMismatch(
                "; ".join(faults),
                where="dense state",
                remedy="build model, optimizers and state= as they were, or restore(strict=False) to take what fits",
            )
        return notes + faults

    def strangers(self, tracking: Tracking) -> frozenset[int]:
        """Optimizers that do not fit the one stored in their place (class, groups): they keep their own state."""
        return frozenset(
            view.index for i, view in enumerate(tracking.optimizers) if self._misfit(i, view) is not None
        )

    def _misfit(self, position: int, view: OptimizerView) -> str | None:
        """How the optimizer stored in this place differs, in words; None when it fits, or none is stored."""
        stored = self.optimizers.get(position)
        if stored is None:
            return None
        if stored["class"] != view.class_name:
            return f"was a {stored['class']} and is a {view.class_name}"
        groups, live = len(stored["groups"]), len(view.target.param_groups)
        return None if groups == live else f"had {groups} parameter groups and has {live}"

    def apply_dense(self, program: Program, *, strict: bool, weights_only: bool) -> list[str]:
        """Tensors, what modules say themselves, optimizers; returns notes on what did not fit."""
        self.apply_tensors(program.tracking, strict=strict)
        notes = self._apply_modules(program, strict=strict)
        return notes if weights_only else notes + self.apply_optimizers(program.tracking)

    def _apply_modules(self, program: Program, *, strict: bool) -> list[str]:
        """What modules say in their own state_dict; then their tensors once more, which loading may have converted."""
        notes = []
        for each in program.contracts:
            try:
                each.load(self.state.get(each.source.name, {}))
            except CheckpointMismatch as error:
                if strict:
                    raise
                notes.append(str(error))
        if program.contracts:
            self.apply_tensors(program.tracking, strict=strict)
        return notes

    def apply_state(self, program: Program, *, strict: bool) -> list[str]:
        """Entries of `state=`; returns notes on what did not fit."""
        notes = []
        modules = {each.source.name for each in program.contracts}
        for source in program.sources:
            if source.name not in self.state or source.name in modules:
                continue
            try:
                source.set(self.state[source.name])
            except CheckpointMismatch as error:
                if strict:
                    raise
                notes.append(f"{error}: it stays as it is")
        return notes

    def apply_tensors(self, tracking: Tracking, *, strict: bool) -> None:
        """Parameters and buffers in place."""
        live = tracking.dense()
        for name, value in self._saved(tracking).items():
            target = live.get(name)
            if self._may_grow(tracking, name, value, target):
                grow(name, value, target, tracking.model)
            elif target is not None and (strict or _fits(value, target)):
                copy_tensor(target, value, where=f"dense tensor {name}")

    def apply_optimizers(self, tracking: Tracking) -> list[str]:
        """Groups and state of the optimizers; what does not fit is left as it is, which `check` said."""
        notes: list[str] = []
        strangers = self.strangers(tracking)
        for i, view in enumerate(tracking.optimizers):
            if i in self.optimizers and view.index not in strangers:
                notes += view.restore(self.optimizers[i], skip=self._misshapen(i, view))
        return notes

    def _saved(self, tracking: Tracking) -> dict[str, Tensor]:
        """Stored dense tensors by the model's names, but for those that it leaves out."""
        aliases = tracking.inventory.aliases
        named = {aliases.get(name, name): value for name, value in self.dense.items()}
        return {name: value for name, value in named.items() if name not in tracking.left_out}

    def _may_grow(self, tracking: Tracking, name: str, value: Tensor, live: Tensor | None) -> bool:
        if live is not None and _fits(value, live):
            return False
        return may_grow(name, value, live, self.meta.get("grown") or {}, tracking.model)

    def _misshapen(self, position: int, view: OptimizerView) -> list[str]:
        """Parameters of an optimizer that had another shape when they were stored."""
        stored = self.optimizers.get(position)
        if stored is None:
            return []
        held = {**self.dense, **stored["orphans"]}
        return [
            name
            for name, param in view.params().items()
            if name in held and tuple(held[name].shape) != tuple(param.shape)
        ]


def _fits(stored: Tensor, live: Tensor) -> bool:
    return stored.shape == live.shape and stored.dtype == live.dtype


def _place_of(source: str) -> str:
    """An entry of `state=`, or a module that says its own state, in words."""
    if source.startswith(contract.MODULE):
        return f"what module {source.removeprefix(contract.MODULE) or 'the model'} says in its state_dict()"
    return f"state[{source!r}]"


def delta_rows(placed: Sequence[_Placed]) -> Iterator[tuple[TrackedTable, Tensor]]:
    """(table, int64 ids that came from delta frames), for re-seeding marks."""
    for each in placed:
        yield each.table, torch.from_numpy(np.flatnonzero(each.from_deltas))
