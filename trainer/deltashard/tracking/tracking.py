"""The facade of tracking: which rows a cut must take, and the live tensors it takes them from.

One `TrackedTable` per shard of a table that this process holds: the whole table, where it is not sharded. Marks, looks
and samples count the shard's own rows; schemas and boxes are the whole table's. How it is tracked is decided here and
may change while training:

    gradients  exactly one optimizer owns it, that optimizer is on the whitelist as it stands (checked before every
               step), its gradients are sparse, and no lookup renormalises (max_norm)
    lookups    a fused kernel changes it within the backward pass, by a rule that changes only rows of the lookup
    hashes     everything else, and small tables, for which one look per cut costs less than anything per step

A table goes over to hashes for good when the whitelist stops to hold, when rows cannot be proven, when an audit fails
or when it is written from outside repeatedly. It is marked whole at that moment, so nothing is missed; the reason is
logged once. A single write from outside (a version counter or address that moved between our hooks, an
optimizer's `load_state_dict`) marks the table whole.

Order at a step boundary, all on the training thread:

    step_done()                         every step
    refresh() -> DirtyCounts            a cut is due: audits, looks at hash tables, refreshes schemas; then counts
    audit_sample()                      draw the next sample
    table.prepare_cut(mode)             per table; ... rows are copied ...
    cut_taken(cut, mode, full=...)      flags move to pending
    committed(cut, ...) | failed(cut)   whenever the news arrives
"""

from __future__ import annotations

import logging
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

import torch
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from torch import Tensor, nn

from deltashard.optimizer.optimizer_state import OptimizerView, views_of
from deltashard.optimizer.whitelist import (
    hookable,
    innermost,
    why_inexact,
    why_replaced,
)
from deltashard.state.discovery import FoundTable, Inventory, TableSettings, discover, dtype_name, sharing
from deltashard.state.kernel_thread import share
from deltashard.state.replica import owners
from deltashard.state.row_hash import Hashing
from deltashard.tracking.audit import AT_CUT, Audit, AuditFault
from deltashard.tracking.extension import find, tracker_of, views
from deltashard.tracking.first_step import FirstStep, Report
from deltashard.tracking.foreign_step import ForeignSteps
from deltashard.tracking.gradient import GradientWatch
from deltashard.tracking.handed_optimizer import HandedOptimizers, parts_of
from deltashard.tracking.marks import DirtyCounts, Marks, Mode, RowSelection, in_graph, settle
from deltashard.tracking.step_hook import StepHooks, Steps, why_not_alone
from deltashard.tracking.tensor_versions import Signature, Signed
from deltashard.tracking.tracker import HashTracker, Tracker, Untracked

_log = logging.getLogger("deltashard.tracking")

_UNSIGNED: Signed = (Signature([]), slice(None))
_WHOLE = slice(None)
_WhyReplaced = Callable[[Any], str | None]
_JOBS_AT_ONCE = 64
"""Chunks of hashing, of all tables together, before their results are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSettings:
    """How tables are found and tracked."""

    tables: TableSettings = field(default_factory=TableSettings)
    hash_below_bytes: int = 256 << 10
    """Tables whose weights take less are looked at by hash at each cut, whatever their optimizer."""
    audit_rows: int = 2048
    """Rows sampled per table and cut; 0 switches the audit off (see `audit.miss_probability`)."""
    audit_rows_in_all: int = 8192
    """Of all tables together: of more than four each gets its share of them, for each row costs a look at memory."""
    verify: Literal["sample", "full"] = "sample"
    """"full": at the first `verify_cuts` cuts every row of tables tracked by gradients is compared, not a sample; rows
    that changed without a mark are named in the log. It reads the tables twice more for each of those cuts."""
    verify_cuts: int = 8
    outside_writes: int = 2
    """After so many writes from outside a table is tracked by hashes."""
    seed: int = 0x5EED
    """Of the hashes and of the audit's samples."""

    def __post_init__(self) -> None:
        """Raise `UserError` for a word that means nothing."""
        if self.verify not in ("sample", "full"):
            raise UserError(
                f"verify={self.verify!r} means nothing",
                where="TrackingSettings",
                remedy='say "full", or leave it out ("sample")',
            )

    def whole_audit(self, nth: int) -> bool:
        """Whether the sample after a table's `nth` cut (from 0) takes every row."""
        return self.verify == "full" and nth < self.verify_cuts

    def audited_rows(self, nth: int, rows: int, tables: int = 1) -> int:
        """How many of the rows of one of `tables` tables the sample after its `nth` cut (from 0) takes."""
        if self.whole_audit(nth):
            return rows
        share = max(1, self.audit_rows_in_all // max(1, tables))
        return min(self.audit_rows, share, rows)


class TrackedTable:
    """One shard of a table: its live tensors, its marks (of its own rows) and how it is tracked."""

    def __init__(self, found: FoundTable, settings: TrackingSettings, *, saver: int | None = None) -> None:
        """`saver`: the rank that saves it, if that is another one: then it is not tracked here."""
        self.fqn = found.fqn
        self.key = found.key
        """Names the shard."""
        self.box = found.box
        """What of the table this is."""
        self.found = found
        self.param = found.param
        self.lookups = found.lookups
        """The modules that look it up."""
        self.aliases = found.aliases
        self.marks = Marks(found.param.shape[0], found.param.device)
        self.views: list[OptimizerView] = []
        """Those that hold state of this table, innermost first."""
        self.sole: Any = None
        """The optimizer that alone owns this table, else None."""
        self.reason = ""
        """Why it is tracked by hashes; empty while it is tracked by gradients."""
        self.schema_version = 0
        self.saver = saver
        """The other rank that saves this replica; None: this process does."""
        self._settings = settings
        self._seed = settings.seed ^ zlib.crc32(found.key.encode())
        self._tracker: Tracker | None = None
        self._audit = Audit(found.key, self._seed)
        self._samples = 0
        self._outside = 0
        self._shares: str | None = None
        self.signed: Signed = _UNSIGNED
        """Its weights and state as they were seen last: what differs from that was written from outside."""
        self._pinned: list[Any] = []
        self._stride = found.param.stride()
        self._schema = self._read_schema()

    @property
    def samples(self) -> int:
        """How many samples the audit has drawn."""
        return self._samples

    # -- what a cut and a restore need

    @property
    def schema(self) -> TableSchema:
        """Of the whole table, as of the last `refresh`: `schema_version` counts its changes (a lazy field appeared)."""
        return self._schema

    @property
    def tracker(self) -> str:
        """How rows are found: "gradients", "lookups" or "hashes"."""
        return "hashes" if self._tracker is None else self._tracker.name

    @property
    def watched(self) -> bool:
        """Whether its rows are marked as they change, by what is known of its writes."""
        return self._tracker is not None and self._tracker.name != "hashes"

    def state_tensors(self) -> dict[str, Tensor]:
        """The live row fields in schema order: [R], [R, 1] or [R, D], possibly on another device than `param`."""
        return {name: tensor for name, (_, tensor) in self._fields().items()}

    def allocate_state(self, spec: FieldSpec) -> Tensor:
        """The live tensor to scatter restored values of `spec` into; see `OptimizerView.allocate`.

        Raises:
            UserError: no optimizer owns this table, or the one that does has other state.
        """
        owner = self.owner_of(spec)
        if owner is None:
            raise UserError(
                f"The checkpoint holds optimizer state {spec.name!r}, but no optimizer of this run would own it",
                where=self.fqn,
                remedy="pass the optimizer to the Checkpointer, or restore with weights_only=True",
            )
        return owner.allocate(self.param, spec, spec.name.partition("@")[0])

    def owner_of(self, spec: FieldSpec) -> OptimizerView | None:
        """The optimizer that holds row field `spec`, by the name it is stored under; None: none here would."""
        nth = int(spec.name.partition("@")[2] or 0)
        return self.views[nth] if nth < len(self.views) else None

    def prepare_cut(self, mode: Mode) -> RowSelection:
        """The rows a cut of this mode takes, as of the last `Tracking.refresh`."""
        return self.marks.select(mode)

    # -- tracking

    def attach(self, owners: Iterable[Any], views: Iterable[OptimizerView]) -> None:
        """Set the optimizers: those handed over that own this table, and the views that hold its state."""
        if self.watched and self._differs():
            self._written_outside()  # `sign` below would take it for seen
        first = self._tracker is None
        self.views = list(views)[::-1]
        owners = list(owners)
        sole = owners[0] if len(owners) == 1 else None
        if not first and sole is not self.sole:
            self.marks.mark_all()  # nobody watched the new one's steps before now
        self.sole = sole
        if self.saver is not None:
            self.reason, self._schema = f"rank {self.saver} saves it", self._read_schema()
            return
        reason = self._why_hashes(owners)
        small = self.param.numel() * self.param.element_size() < self._settings.hash_below_bytes
        if reason is not None or small:
            self.fall_back_to_hashing(reason or "it is small", quiet=reason is None)
        elif first:
            self._tracker = tracker_of(self.found, self.marks, self.lost)
        if first:  # later `refresh` looks: a field that appeared, or another shape, must not pass for seen
            self._schema = self._read_schema()
        self.sign()

    def fall_back_to_hashing(self, reason: str, *, quiet: bool = False) -> None:
        """Track by hashes from now on."""
        if isinstance(self._tracker, HashTracker) or self.saver is not None:
            return
        self.close()
        self.signed, self._pinned = _UNSIGNED, []
        self._tracker = HashTracker(self._seed)
        if not in_graph(self.param):  # the first look marks all of it anyway
            self.marks.mark_all()
        self.reason = reason
        level = logging.DEBUG if quiet else logging.INFO
        _log.log(level, "table %s is tracked by row hashes at each cut: %s", self.key, reason)

    def before_step(self, inexact: str | None) -> None:
        """Before the sole owner's step: is the whitelist still true, was the table written from outside?

        `inexact` is what `why_inexact` and `why_not_alone` say of the owner now.
        """
        if not self.watched or self._left_to_graph():
            return
        reason = inexact or self._why_not_lookups()
        if reason is not None:
            self.fall_back_to_hashing(reason)
        elif self._differs():
            self._written_outside()
        self.hold()

    def hold(self) -> None:
        """Keep the gradient that the sole owner's step is about to apply."""
        if self._tracker is not None:
            self._tracker.hold()

    def after_step(self) -> None:
        """After the sole owner's step: take what it wrote as seen."""
        if not self.watched:
            return
        signature, (seen, part) = Signature(self.signable()), self.signed
        if signature.addresses != seen.addresses[part]:
            self.sign()  # state appeared or was re-bound within the step: pin it
        else:
            self.signed = (signature, _WHOLE)

    def mark_held(self) -> None:
        """The step applied the gradient that was held: mark its rows."""
        if self._tracker is None or not self.watched or self._left_to_graph():
            return
        try:
            self._tracker.stepped()
        except Untracked as untracked:
            self.fall_back_to_hashing(str(untracked))

    def _left_to_graph(self) -> bool:
        """Whether its optimizer's step is being captured: then it is tracked by hashes, and nothing is marked.

        A mark would become part of the graph, which would write flags at each replay, even after they were freed.
        """
        if not in_graph(self.param):
            return False
        self.fall_back_to_hashing("its optimizer runs inside a CUDA graph, where no hook does")
        return True

    def lost(self, error: Exception) -> None:
        """Telling this table's rows raised `error` (its weight was resized in place, say): hashes from now on."""
        self.fall_back_to_hashing(f"its changed rows cannot be told ({type(error).__name__}: {error})")

    def refresh(self, why: _WhyReplaced) -> None:
        """Bring marks and schema up to date for a cut; a look at hashes follows.

        `why` is `why_replaced`, which may remember what it answered at this cut.
        """
        self.mark_if_written()
        if self.watched and self.marks.flags.device != self.param.device:
            self.fall_back_to_hashing("it moved to another device")
        if self.tracker == "gradients" and (reason := self._why_not_here(self.sole, why)) is not None:
            self.fall_back_to_hashing(reason)
        if self.param.stride() != self._stride:  # which neither versions nor addresses show
            self._stride = self.param.stride()
            self.marks.mark_all()
        if self.marks.flags.device != self.param.device:
            self.marks = Marks(self.param.shape[0], self.param.device)
        schema = self._read_schema()
        if schema != self._schema:
            self._schema = schema
            self.schema_version += 1
            self.marks.mark_all()

    def look(self) -> Hashing | None:
        """After `refresh`: begin the look at a table that is tracked by hashes; `looked` ends it."""
        return None if self._tracker is None else self._tracker.begin(self._sections())

    def looked(self, hashing: Hashing) -> None:
        """All jobs of the look have run: mark what differs."""
        if self._tracker is not None:
            self._tracker.end(hashing, self._sections(), self.marks)

    def reseed(self, ids: Tensor | None) -> None:
        """See `Marks.reseed`; call it when weights *and* row fields are restored."""
        self._schema = self._read_schema()
        self.marks.reseed(ids)
        self._audit.forget()
        if self._tracker is not None:
            self._tracker.adopt(self._sections())
        self.sign()

    def audit_draw(self, tables: int) -> Callable[[], None] | None:
        """Draw the audit's next sample, as one of so many tables; what it returns looks at the rows."""
        count = self._settings.audited_rows(self._samples, self.marks.rows, tables)
        self._samples += 1
        if self.watched and count:
            return self._audit.draw(self._sections(), count)
        self._audit.forget()
        return None

    def audit_ahead(self) -> Callable[[], None] | None:
        """What compares the sample ahead of the cut, on another thread; None: nothing is sampled."""
        return self._audit.ahead(self._sections()) if self.watched else None

    def audit_check(self, *, ahead: bool = False) -> AuditFault | None:
        """Check the sample, or take what was found ahead; a fault marks everything and ends tracking by gradients."""
        if not self.watched or self._differs():
            return None  # what was written from outside with a trace is no fault: `refresh` marks all of it
        fault = self._audit.check(self._sections(), self.marks, ahead=ahead)
        if fault is not None:
            self.fall_back_to_hashing("an audit found rows that changed unseen")
        return fault

    def stray_check(self, rows: Tensor) -> AuditFault | None:
        """Before `refresh`: `rows` (int64 [n]) were stored at the last cut as something else than they were.

        Those that no mark tells of since are a fault, as `audit_check` has them.
        """
        if not self.watched or self._differs():
            return None
        wrong = rows[self.marks.clean(rows)].tolist()
        if not wrong:
            return None
        self.fall_back_to_hashing(
            "rows were copied while it was written without a trace (through .data), and put back since"
        )
        return AuditFault(table=self.key, rows=tuple(wrong[:16]), found=len(wrong), checked=len(rows))

    def close(self) -> None:
        """Remove the hooks."""
        if self._tracker is not None:
            self._tracker.close()

    def found_again(self, found: FoundTable) -> None:
        """The same parameter; other modules may look it up now."""
        self.found, self.lookups, self.aliases = found, found.lookups, found.aliases

    def shared_with(self, other: str | None) -> None:
        """What lies in the same memory, by name; its steps write these rows, too."""
        self._shares = other
        if other is not None and self._tracker is not None:
            self.fall_back_to_hashing(self._why_shared(other))

    @staticmethod
    def _why_shared(other: str) -> str:
        return f"it shares its memory with {other}"

    def is_like(self, found: FoundTable) -> bool:
        """Whether `found`, of the same name, has the shape and type that this table was tracked with."""
        return found.box == self.box and dtype_name(found.param.dtype) == self._schema.dtype

    def rebind(self, found: FoundTable) -> None:
        """The model holds another parameter of the same shape now, or another module in this place."""
        self.found_again(found)
        self.param = found.param
        _log.warning(
            "the parameter of table %s was replaced: it is saved whole, as new content. "
            "The optimizer must be given the new one",
            self.fqn,
        )
        self.fall_back_to_hashing("its parameter was replaced", quiet=True)
        self.marks.mark_all()

    def sign(self) -> None:
        """Take versions and addresses as they are.

        The memory is pinned meanwhile, so that an address that was seen cannot come back as another tensor's.
        """
        if not self.watched:
            self.signed, self._pinned = _UNSIGNED, []
            return
        tensors = self.signable()
        self.signed = (Signature(tensors), _WHOLE)
        self._pinned = [t.untyped_storage() for t in tensors if t.layout == torch.strided]

    def mark_outside(self) -> None:
        """Someone wrote this table, or its state, outside of an optimizer's step."""
        if self.watched:
            self._written_outside()
            self.sign()

    def mark_if_written(self) -> None:
        """The same where versions or addresses show it."""
        if self.watched and self._differs():
            self._written_outside()
            self.sign()

    def rewritten(self) -> None:
        """We wrote its state ourselves: every row counts as changed."""
        if self.watched and self._left_to_graph():
            return
        self.marks.mark_all()
        self.sign()

    def _written_outside(self) -> None:
        self.marks.mark_all()
        self._outside += 1
        if self._outside >= self._settings.outside_writes:
            self.fall_back_to_hashing("it is written outside of its optimizer's steps")
        else:
            _log.warning(
                "table %s was written outside of its optimizer's step: all of its rows count as changed. "
                "If this happens again it will be tracked by row hashes",
                self.fqn,
            )

    def _why_hashes(self, owners: list[Any]) -> str | None:
        if self.found.hashed:
            return self.found.hashed
        if self.found.kernel is not None:
            return self._why_shared(self._shares) if self._shares else self.found.kernel.why_inexact
        if len(owners) != 1:
            return "no optimizer owns it" if not owners else "several optimizers own it"
        # A wrapper that is no torch optimizer is not on the whitelist either.
        if self._shares is not None:
            return self._why_shared(self._shares)
        dense = not all(lookup.sparse for lookup in self.lookups)
        return (
            why_inexact(owners[0])
            or why_not_alone(owners[0])
            or self._why_not_lookups()
            or ("its gradients are dense (sparse=False)" if dense else None)
            or self._why_not_here(owners[0], why_replaced)
        )

    def _why_not_here(self, owner: Any, why: _WhyReplaced) -> str | None:
        """What is looked at when a cut is due, not at each step."""
        if self.param.device.type == "cpu" and self.param.is_shared():  # type: ignore[no-untyped-call]
            return "its memory is shared with other processes"
        return why(owner)

    def _why_not_lookups(self) -> str | None:
        if not self.param.requires_grad:
            return "it is frozen"
        for module in self.lookups:
            if module.max_norm is not None:
                return "max_norm renormalises rows at lookup"
        return None

    def _differs(self) -> bool:
        now, (seen, part) = Signature(self.signable()), self.signed
        return now.versions != seen.versions[part] or now.addresses != seen.addresses[part]

    def signable(self) -> list[Tensor]:
        """What is signed: the weights, and the tensors of the optimizers' state, in the order of their names."""
        state = [e[key] for e in self.entries() for key in sorted(e, key=str)]
        return [self.param, *(value for value in state if isinstance(value, Tensor))]

    def entries(self) -> list[Mapping[Any, Any]]:
        """The optimizers' state of this table, innermost first."""
        return [entry for view in self.views if (entry := view.target.state.get(self.param))]

    def _fields(self) -> dict[str, tuple[str, Tensor]]:
        found: dict[str, tuple[str, Tensor]] = {}
        for nth, view in enumerate(self.views):
            for key, (kind, tensor) in view.fields(self.param).items():
                found[_name(key, nth)] = (kind, tensor)
        return dict(sorted(found.items()))

    def _sections(self) -> list[Tensor]:
        return [self.param.detach(), *(t for _, t in self._fields().values())]

    def _read_schema(self) -> TableSchema:
        return TableSchema(
            fqn=self.fqn,
            rows=self.found.rows,
            columns=self.found.columns,
            dtype=dtype_name(self.param.dtype),
            fields=tuple(
                FieldSpec(name=name, kind=cast("Any", kind), dtype=dtype_name(tensor.dtype))
                for name, (kind, tensor) in self._fields().items()
            ),
        )


class Tracking:
    """All tables of a model under its optimizers."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any = (),
        *,
        settings: TrackingSettings | None = None,
        report: Report | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Discover tables and install hooks.

        Args:
            model: the module whose tables and dense tensors are tracked, wrapped or not.
            optimizers: one optimizer or an iterable of them; wrappers (Lookahead, ...) are looked into. Fused ones are
                found in the model.
            settings: see `TrackingSettings`.
            report: told of events that the log tells as well: state_thrown_away (table, field),
                gradient_alive (parameter, optimizer).
            rank: of this process, in a group of `world_size`.
            world_size: with more than one, what every rank holds whole is saved by one of them.

        Raises:
            UserError: see `discovery.discover` and `handed_optimizer.parts_of`.
        """
        self.settings = settings or TrackingSettings()
        self.model = model
        self._handed = HandedOptimizers(optimizers, model)
        self._hooks: list[StepHooks] = []
        self.steps = Steps()
        self.report: Report = report or (lambda _name, _facts: None)
        self._rank, self._world_size = rank, world_size
        self._inventory = discover(model, self.settings.tables, find)
        self._savers = self._shared_out()
        self.tables = [self._tracked(found) for found in self._inventory.tables.values()]
        self.by_key = {table.key: table for table in self.tables}
        self.regrown = False
        """Whether tables came or went since the last cut: the next one is to be full."""
        self._addresses: list[int] = []
        self._alive_said = False
        self.optimizers: list[OptimizerView] = self._views(self._inventory)
        self._left_out: frozenset[str] = frozenset()
        for view in self.optimizers:
            view.watch_attributes()
        self.faults = 0
        """Audit faults since the start."""
        self._audits = 0
        self._sampling: Future[None] | None = None
        self._grouped: list[list[Tensor]] | None = None
        """Parameters by optimizer, as of the last `_attach`."""
        self._named = self._inventory
        self._install()
        self._foreign = ForeignSteps(
            model,
            known=lambda: [hooks.optimizer for hooks in self._hooks],
            parts=lambda optimizer: parts_of([optimizer]),
            adopt=self.adopt,
        )
        self._attach()
        self.on_cuda = any(device.type == "cuda" for device in self._devices())
        """Whether something of the program lies on a GPU, as of the last cut."""
        _live.add(self)

    @property
    def inventory(self) -> Inventory:
        """Names, aliases and dense tensors as of the last look."""
        return self._inventory

    def dense(self, *, look: bool = True) -> dict[str, Tensor]:
        """Live parameters and persistent buffers that are no tables, by canonical name, read from the model now.

        Without those that are left out. `look=False`: as `refresh` has just found them.
        """
        if look:
            self._inventory = discover(self.model, self.settings.tables, find)
        return {name: tensor for name, tensor in self._inventory.dense.items() if name not in self._left_out}

    @property
    def saved(self) -> list[TrackedTable]:
        """The shards that this process saves; replicas are one rank's."""
        return [table for table in self.tables if table.saver is None]

    def saves(self, name: str) -> bool:
        """Whether this process saves the dense tensor `name`."""
        return self._savers.get(name, 0) == self._rank

    @property
    def replicas(self) -> dict[str, Tensor]:
        """What must be the same on all ranks, by name: parameters, of which each rank has all, and such tables."""
        if self._world_size == 1:
            return {}
        dense = {
            name: tensor for name, tensor in self._inventory.dense.items() if isinstance(tensor, nn.Parameter)
        }
        return dense | {table.key: table.param for table in self.tables if table.found.replicated}

    def _shared_out(self) -> dict[str, int]:
        """Which rank saves each replica. Buffers may differ (statistics of a rank's batches): they are rank 0's."""
        if self._world_size == 1:
            return {}
        held = {name: found.param for name, found in self._inventory.tables.items() if found.replicated}
        held |= {name: t for name, t in self._inventory.dense.items() if isinstance(t, nn.Parameter)}
        return owners({name: t.numel() * t.element_size() for name, t in held.items()}, self._world_size)

    def _tracked(self, found: FoundTable) -> TrackedTable:
        saver = self._savers.get(found.key, self._rank) if found.replicated else self._rank
        return TrackedTable(found, self.settings, saver=None if saver == self._rank else saver)

    @property
    def left_out(self) -> frozenset[str]:
        """Dense tensors that are not saved."""
        return self._left_out

    def leave_out(self, names: frozenset[str]) -> None:
        """Do not save these dense tensors: a module's own contract says so."""
        self._left_out = names

    @property
    def hooked(self) -> bool:
        """Whether there is a torch optimizer that can be asked whether it stepped."""
        return bool(self._hooks)

    @property
    def stepped(self) -> bool:
        """Whether an optimizer stepped since the last `step_done`; always true when no torch optimizer can be asked."""
        return self.steps.stepped or not self._hooks

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter of the optimizers holds a gradient now."""
        return any(param.grad is not None for params in _by_view(self.optimizers) for param in params)

    def step_done(self) -> None:
        """The loop body's last statement ran; costs nanoseconds."""
        self.steps.done()

    def settle(self) -> None:
        """Wait for the accelerators that a cut reads: their copies run on one stream, training may use several."""
        devices = self._devices()
        self.on_cuda = any(device.type == "cuda" for device in devices)
        for device in devices:
            settle(device)

    def _devices(self) -> set[torch.device]:
        tensors = [*(table.param for table in self.tables), *self._inventory.dense.values()]
        return {tensor.device for tensor in tensors}

    def refresh(self) -> DirtyCounts:
        """Bring marks and schemas up to date for a cut and count the rows it would take."""
        self.adopt()
        self._look()
        known = self._grouped
        if known is None or _places(_by_view(self.optimizers)) != _places(known):
            self._attach()
        elif [table.param.data_ptr() for table in self.tables] != self._addresses:
            self._share()
        if self.steps.first is not None:
            self.steps.first.finish()
            self.steps.first = None
        why = cache(why_replaced)
        for table in self.tables:
            table.refresh(why)
        self._look_at_state()
        self._look_at_hashes()
        self._index()
        counts = [table.marks.counts() for table in self.saved]
        return DirtyCounts(
            commit=sum(c.commit for c in counts),
            baseline=sum(c.baseline for c in counts),
            total=sum(c.total for c in counts),
        )

    def _look_at_state(self) -> None:
        """State that two tables have in one memory is another's to change: both are hashed."""
        held: dict[int, TrackedTable] = {}
        for table in self.tables:
            for tensor in table.signable()[1:]:
                address = tensor.data_ptr() if tensor.layout == torch.strided and tensor.dim() else 0
                other = held.setdefault(address, table)
                if address and other is not table:
                    for each, of in ((table, other), (other, table)):
                        each.shared_with(f"the state of {of.key}")

    def _look_at_hashes(self) -> None:
        """Many small tables are looked at together; what a look takes meanwhile (8 bytes a row) is bounded."""
        looks: list[tuple[TrackedTable, Hashing]] = []
        jobs = 0
        for table in self.tables:
            look = table.look()
            if look is not None:
                looks.append((table, look))
                jobs += len(look.jobs)
            if jobs >= _JOBS_AT_ONCE or table is self.tables[-1]:
                share([job for _, each in looks for job in each.jobs])
                for each, done in looks:
                    each.looked(done)
                looks, jobs = [], 0

    def cut_taken(self, cut: int, mode: Mode, *, full: bool = False) -> None:
        """Every table's selection was copied for `cut`; `full`: all rows of all tables were (implied by "all")."""
        for table in self.tables:
            table.marks.cut_taken(cut, full=full or mode == "all")
        self.regrown = False
        if self.steps.gradients is not None:
            self.steps.gradients.close()
            self.steps.gradients = None
        if not self._alive_said:
            watch = GradientWatch([hooks.optimizer for hooks in self._hooks], self._gradient_alive)
            self.steps.gradients = None if watch.over else watch

    def committed(self, cut: int, *, baseline: bool) -> None:
        """The commit of `cut` is known; repeated, late and unknown cuts are harmless."""
        for table in self.tables:
            table.marks.committed(cut, baseline=baseline)

    def rebase(self) -> None:
        """What changed since the newest commit is, from now on, what changed since the baseline."""
        for table in self.tables:
            table.marks.rebase()

    def failed(self, cut: int) -> None:
        """`cut` failed: its rows are changed rows again."""
        for table in self.tables:
            table.marks.failed(cut)

    def reseed(self, table: TrackedTable, ids: Tensor | None) -> None:
        """`table` was restored; `ids` (int64 [n]) came from delta frames, None: treat every row so."""
        table.reseed(ids)

    def audit_sample(self, later: Callable[[Callable[[], None]], Future[None]] | None = None) -> None:
        """Draw fresh samples of rows, at the boundary of a cut and after the check of the last ones.

        `later` has them looked at on another thread; not where every row is, which is to miss no write at all.
        """
        whole = any(self.settings.whole_audit(table.samples) for table in self.tables)
        drawn = [table.audit_draw(len(self.tables)) for table in self.tables]
        looks = [look for look in drawn if look is not None]

        def look_all() -> None:
            for look in looks:
                look()

        if later is None or whole or any(table.param.device.type != "cpu" for table in self.tables):
            look_all()
        elif looks:
            self._sampling = later(look_all)

    def audit_ahead(self) -> list[Callable[[], None]]:
        """What compares the samples shortly before a cut, while training goes on; on the thread that drew them."""
        if self.settings.verify == "full":
            return []
        return [look for table in self.tables if (look := table.audit_ahead()) is not None]

    def audit_before_commit(self, *, ahead: bool = False) -> list[AuditFault]:
        """Check the samples before the next cut is prepared; with a fault that cut should be full.

        `ahead`: `audit_ahead` compared them right before this cut; only the tables whose turn it is are compared again.
        """
        if self._sampling is not None:
            sampling, self._sampling = self._sampling, None
            if (failed := sampling.exception()) is not None:
                _log.debug("the sample of an audit could not be drawn", exc_info=failed)
        faults = []
        for nth, table in enumerate(self.tables):
            fault = table.audit_check(ahead=ahead and (nth + table.samples) % AT_CUT != 0)
            if fault is not None:
                _log.error("%s", fault)
                faults.append(fault)
        self.faults += len(faults)
        if self.settings.verify == "full" and self._audits <= self.settings.verify_cuts:
            if self._audits == self.settings.verify_cuts:
                _log.info(
                    'verify="full": %d cuts were compared row by row, %d faults', self._audits, self.faults
                )
            self._audits += 1
        return faults

    def watch_first_step(self) -> None:
        """After a restore: see `FirstStep`."""
        first = FirstStep(self.tables, self.report)
        self.steps.first = None if first.over else first

    def close(self) -> None:
        """Remove all hooks."""
        self._foreign.close()
        if self.steps.gradients is not None:
            self.steps.gradients.close()
            self.steps.gradients = None
        for hooks in self._hooks:
            hooks.close()
        self._hooks.clear()
        for table in self.tables:
            table.close()

    def _views(self, inventory: Inventory) -> list[OptimizerView]:
        """Of the optimizers that were handed over, in order, then of the fused ones."""
        return views(views_of(self._handed.now, inventory.names, self.by_key, inventory.fused), inventory)

    def _attach(self) -> None:
        self._grouped = _by_view(self.optimizers)
        self._share()
        for table in self.tables:
            owners = [o for o in self._handed.now if any(_owns(x, table.param) for x in (o, *innermost(o)))]
            table.attach(owners, [v for v in self.optimizers if _owns(v.target, table.param)])
        self._index()

    def _share(self) -> None:
        """Tables that lie in one memory with something else are hashed: another's step writes their rows."""
        self._addresses = [table.param.data_ptr() for table in self.tables]
        others = sharing(self._inventory)
        for table in self.tables:
            table.shared_with(others.get(table.key))

    def _index(self) -> None:
        """Tell the hooks of every optimizer its tables; not within a step, whose hooks go through them."""
        by_owner: dict[int, list[TrackedTable]] = {}
        for table in self.tables:
            if table.tracker == "gradients":
                by_owner.setdefault(id(table.sole), []).append(table)
        for hooks in self._hooks:
            hooks.watch(by_owner.get(id(hooks.optimizer), []))

    def adopt(self) -> None:
        """Take over optimizers that others replaced in the list that was given, or in an attribute of the model."""
        if not self._handed.look():
            return
        live = [optimizer for handed in self._handed.now for optimizer in hookable(handed)]
        for hooks in self._hooks:
            if not any(hooks.optimizer is optimizer for optimizer in live):
                hooks.close()
                self.steps.inside.discard(hooks.optimizer)
        self._hooks = [hooks for hooks in self._hooks if any(hooks.optimizer is each for each in live)]
        self._install()
        self._view_again()
        kinds = ", ".join(type(view.target).__name__ for view in self.optimizers)
        _log.warning(
            "an optimizer was replaced while training: from now on checkpoints hold those that are there now (%s). "
            "To restore such a checkpoint, build the same optimizers before the Checkpointer",
            kinds,
        )

    def _install(self) -> None:
        known = {id(hooks.optimizer) for hooks in self._hooks}
        for handed in self._handed.now:
            for optimizer in hookable(handed):
                if id(optimizer) not in known:
                    known.add(id(optimizer))
                    self._hooks.append(
                        StepHooks(optimizer, self.steps, loaded=self._state_loaded, regrouped=self._regrouped)
                    )

    def _state_loaded(self, optimizer: Any) -> None:
        if any(view.restoring for view in self.optimizers):
            return
        for table in self.tables:
            if table.sole is optimizer:
                table.mark_outside()

    def _regrouped(self, optimizer: Any) -> None:
        """Parameters were added to a handed optimizer, which is about to step: it may change another's tables."""
        for table in self.tables:
            if table.sole is not optimizer and _owns(optimizer, table.param):
                table.rewritten()

    def _gradient_alive(self, param: Tensor, optimizer: Any) -> None:
        if self._alive_said:
            return
        self._alive_said = True
        name, kind = self._inventory.names.get(param, "a parameter"), type(optimizer).__name__
        _log.warning(
            "the gradient of %s was there at a cut and is used after it (%s steps less often than step() is called, "
            "applies gradients late, or keeps them). No checkpoint holds .grad: a run that resumes from one goes on "
            "without it, so not bit for bit. Save where gradients were applied and will be zeroed",
            name,
            kind,
        )
        self.report("gradient_alive", {"parameter": name, "optimizer": kind})

    def _look(self) -> None:
        """Find the tables in the model as it is now, by name: modules may be replaced, added or gone.

        A table of another shape or type than before is a new table of that name.
        """
        before = self._named
        now = discover(self.model, self.settings.tables, find)
        same = {key: table for key, table in self.by_key.items() if key in now.tables}
        same = {key: table for key, table in same.items() if table.is_like(now.tables[key])}
        for key, table in same.items():
            found = now.tables[key]
            if found.param is not table.param:
                table.rebind(found)
            else:
                table.found_again(found)
        self._inventory = now
        self._savers = self._shared_out()
        alike = same.keys() == self.by_key.keys() == now.tables.keys()
        if alike and [*map(id, before.names)] == [*map(id, now.names)]:
            return
        if not alike:
            self.regrown = True
            for table in self.tables:
                if table.key not in same:
                    table.close()
            self.by_key = {key: same.get(key) or self._tracked(found) for key, found in now.tables.items()}
            self.tables = list(self.by_key.values())
        self._view_again()
        self._named = now

    def _view_again(self) -> None:
        """Optimizers, or what they step, changed: have views of them as they are now."""
        earlier = self.optimizers
        self.optimizers = self._views(self._inventory)
        for view in self.optimizers:
            view.watch_attributes(earlier)
        self._grouped = None


def _by_view(views: Iterable[OptimizerView]) -> list[list[Tensor]]:
    """Of each optimizer, the parameters of all groups."""
    return [[param for group in view.target.param_groups for param in group["params"]] for view in views]


def _places(grouped: list[list[Tensor]]) -> list[list[int]]:
    return [[*map(id, params)] for params in grouped]


def _owns(optimizer: Any, param: Tensor) -> bool:
    return any(p is param for group in getattr(optimizer, "param_groups", ()) for p in group["params"])


def _name(key: str, nth: int) -> str:
    """Canonical name of a state key: the innermost optimizer's as it is, its wrappers' with @1, @2, ..."""
    return f"{key}@{nth}" if nth else key


_live: weakref.WeakSet[Tracking] = weakref.WeakSet()


def _in_child() -> None:
    # A forked worker trains nothing of ours: what it runs of the model must not be watched.
    for tracking in list(_live):
        tracking.on_cuda = False  # nor may CUDA be asked anything there
        tracking.close()


os.register_at_fork(after_in_child=_in_child)
