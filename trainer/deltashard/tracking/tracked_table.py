"""One shard of a table: its live tensors, its marks and how its rows are tracked.

Marks, looks and samples count the shard's own rows; schemas and boxes are the whole table's. How it is tracked is
decided here and may change while training:

    gradients  exactly one optimizer owns it, that optimizer is on the whitelist as it stands (checked before every
               step), its gradients are sparse, and no lookup renormalises (max_norm)
    lookups    a fused kernel changes it within the backward pass, by a rule that changes only rows of the lookup
    hashes     everything else, and small tables, for which one look per cut costs less than anything per step

A table goes over to hashes for good when the whitelist stops to hold, when rows cannot be proven, when an audit fails
or when it is written from outside repeatedly. It is marked whole at that moment, so nothing is missed; the reason is
logged once. A single write from outside (a version counter or address that moved between our hooks, an
optimizer's `load_state_dict`) marks the table whole.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from torch import Tensor

from deltashard.optimizer.optimizer_state import OptimizerView
from deltashard.optimizer.whitelist import inexact_reason, replaced_step_reason
from deltashard.state.discovery import FoundTable, TableSettings, dtype_name
from deltashard.state.row_hash import Hashing
from deltashard.tracking.audit import Audit, AuditFault
from deltashard.tracking.extension import tracker_of
from deltashard.tracking.marks import Marks, Mode, RowSelection, in_graph
from deltashard.tracking.step_hook import foreign_hook_reason
from deltashard.tracking.tensor_versions import Signature, Signed
from deltashard.tracking.tracker import HashTracker, Tracker, Untracked

_log = logging.getLogger("deltashard.tracking")

_UNSIGNED: Signed = (Signature([]), slice(None))
_WHOLE = slice(None)
_WhyReplaced = Callable[[Any], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSettings:
    """How tables are found and tracked."""

    tables: TableSettings = field(default_factory=TableSettings)
    hash_below_bytes: int = 256 << 10
    """Tables whose weights take less are looked at by hash at each cut, whatever their optimizer."""
    audit_rows: int = 2048
    """Rows sampled per table and cut (see `audit`); 0 switches the audit off.

    A table with no more rows than that (and than its share of `audit_rows_in_all`) is compared whole: at each cut, by
    the training thread. A smaller sample is hashed and compared beside training, where rows are copied ahead of cuts.
    """
    audit_rows_in_all: int = 8192
    """Of all tables together: of more than four each gets its share of them, for each row costs a look at memory."""
    outside_writes: int = 2
    """After so many writes from outside a table is tracked by hashes."""
    seed: int = 0x5EED
    """Of the hashes and of the audit's samples."""

    def audited_rows(self, rows: int, tables: int) -> int:
        """How many of the rows of one of `tables` tables a sample takes."""
        return min(self.audit_rows, max(1, self.audit_rows_in_all // tables), rows)


class TrackedTable:  # noqa: PLR0904
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
        self._audits_all = False
        """Whether the sample is all rows: it is read at cuts only."""
        self.samples = 0
        self._outside = 0
        self._shares: str | None = None
        self.signed: Signed = _UNSIGNED
        """Its weights and state as they were seen last: what differs from that was written from outside."""
        self._pinned: list[Any] = []
        self._stride = found.param.stride()
        self._schema = self._read_schema()

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

    def select_rows(self, mode: Mode) -> RowSelection:
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
        reason = self._hashing_reason(owners)
        small = self.param.numel() * self.param.element_size() < self._settings.hash_below_bytes
        if reason is not None or small:
            self.fall_back_to_hashing(reason or "it is small", quiet=reason is None)
        elif first:
            self._tracker = tracker_of(self.found, self.marks, self.on_tracking_error)
        if first:  # later `refresh` looks: a field that appeared, or another shape, must not pass for seen
            self._schema = self._read_schema()
        self.sign()

    def fall_back_to_hashing(self, reason: str, *, quiet: bool = False) -> None:
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

        `inexact` is what `inexact_reason` and `foreign_hook_reason` say of the owner now.
        """
        if not self.watched or self._is_captured():
            return
        reason = inexact or self._lookups_unavailable_reason()
        if reason is not None:
            self.fall_back_to_hashing(reason)
        elif self._differs():
            self._written_outside()
        self.hold_gradient()

    def hold_gradient(self) -> None:
        if self._tracker is not None:
            self._tracker.hold_gradient()

    def after_step(self) -> None:
        """After the sole owner's step: take what it wrote as seen."""
        if not self.watched:
            return
        signature, (seen, part) = Signature(self.signable()), self.signed
        if signature.addresses != seen.addresses[part]:
            self.sign()  # state appeared or was re-bound within the step: pin it
        else:
            self.signed = (signature, _WHOLE)

    def mark_gradient_rows(self) -> None:
        if self._tracker is None or not self.watched or self._is_captured():
            return
        try:
            self._tracker.stepped()
        except Untracked as untracked:
            self.fall_back_to_hashing(str(untracked))

    def _is_captured(self) -> bool:
        """Whether its optimizer's step is being captured: then it is tracked by hashes, and nothing is marked.

        A mark would become part of the graph, which would write flags at each replay, even after they were freed.
        """
        if not in_graph(self.param):
            return False
        self.fall_back_to_hashing("its optimizer runs inside a CUDA graph, where no hook does")
        return True

    def on_tracking_error(self, error: Exception) -> None:
        """Telling this table's rows raised `error` (its weight was resized in place, say): hashes from now on."""
        self.fall_back_to_hashing(f"its changed rows cannot be told ({type(error).__name__}: {error})")

    def refresh(self, why: _WhyReplaced) -> None:
        """Bring marks and schema up to date for a cut; a look at hashes follows.

        `why` is `replaced_step_reason`, which may remember what it answered at this cut.
        """
        self.mark_if_written()
        if self.watched and self.marks.flags.device != self.param.device:
            self.fall_back_to_hashing("it moved to another device")
        if (
            self.tracker == "gradients"
            and (reason := self._gradient_tracking_blocked_reason(self.sole, why)) is not None
        ):
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

    def begin_hashing(self) -> Hashing | None:
        """After `refresh`: begin the look at a table that is tracked by hashes; `end_hashing` ends it."""
        return None if self._tracker is None else self._tracker.begin(self._sections())

    def end_hashing(self, hashing: Hashing) -> None:
        if self._tracker is not None:
            self._tracker.end(hashing, self._sections(), self.marks)

    def reseed(self, ids: Tensor | None) -> None:
        """Weights and row fields were restored; `ids` (int64 [n]) came from delta frames, None: every row did."""
        self._schema = self._read_schema()
        self.marks.reseed(ids)
        self._audit.forget()
        if self._tracker is not None:
            self._tracker.adopt(self._sections())
        self.sign()

    def audit_draw(self, tables: int) -> Callable[[], None] | None:
        """Draw the audit's next sample, as one of so many tables; what it returns looks at the rows.

        A sample of all rows is looked at here: what it is drawn for must not miss what is written beside a thread.
        """
        count = self._settings.audited_rows(self.marks.rows, tables)
        self.samples += 1
        self._audits_all = count == self.marks.rows
        if not self.watched or not count:
            self._audit.forget()
            return None
        begin_hashing = self._audit.draw(self._sections(), count)
        if not self._audits_all:
            return begin_hashing
        begin_hashing()
        return None

    def audit_ahead(self) -> Callable[[], None] | None:
        """What compares the sample ahead of the cut, on another thread; None: nothing is sampled, or all rows are."""
        return self._audit.ahead(self._sections()) if self.watched and not self._audits_all else None

    def audit_check(self, *, ahead: bool = False) -> AuditFault | None:
        """Check the sample, or take what was found ahead; a fault marks everything and ends tracking by gradients."""
        if not self.watched or self._differs():
            return None  # what was written from outside with a trace is no fault: `refresh` marks all of it
        fault = self._audit.check(self._sections(), self.marks, ahead=ahead)
        if fault is not None:
            self.fall_back_to_hashing("an audit found rows that changed unseen")
        return fault

    def check_unmarked_rows(self, rows: Tensor) -> AuditFault | None:
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
        if self._tracker is not None:
            self._tracker.close()

    def update_found(self, found: FoundTable) -> None:
        """The same parameter; other modules may look it up now."""
        self.found, self.lookups, self.aliases = found, found.lookups, found.aliases

    def shared_with(self, other: str | None) -> None:
        """What lies in the same memory, by name; its steps write these rows, too."""
        self._shares = other
        if other is not None and self._tracker is not None:
            self.fall_back_to_hashing(self._shared_reason(other))

    @staticmethod
    def _shared_reason(other: str) -> str:
        return f"it shares its memory with {other}"

    def matches(self, found: FoundTable) -> bool:
        """Whether `found`, of the same name, has the shape and type that this table was tracked with."""
        return found.box == self.box and dtype_name(found.param.dtype) == self._schema.dtype

    def rebind(self, found: FoundTable) -> None:
        """The model holds another parameter of the same shape now, or another module in this place."""
        self.update_found(found)
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
        if self.watched and self._differs():
            self.mark_outside()

    def rewritten(self) -> None:
        """We wrote its state ourselves: every row counts as changed."""
        if self.watched and self._is_captured():
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

    def _hashing_reason(self, owners: list[Any]) -> str | None:
        if self.found.hashed:
            return self.found.hashed
        if self.found.kernel is not None:
            return self._shared_reason(self._shares) if self._shares else self.found.kernel.inexact_reason
        if len(owners) != 1:
            return "no optimizer owns it" if not owners else "several optimizers own it"
        # A wrapper that is no torch optimizer is not on the whitelist either.
        if self._shares is not None:
            return self._shared_reason(self._shares)
        dense = not all(lookup.sparse for lookup in self.lookups)
        return (
            inexact_reason(owners[0])
            or foreign_hook_reason(owners[0])
            or self._lookups_unavailable_reason()
            or ("its gradients are dense (sparse=False)" if dense else None)
            or self._gradient_tracking_blocked_reason(owners[0], replaced_step_reason)
        )

    def _gradient_tracking_blocked_reason(self, owner: Any, why: _WhyReplaced) -> str | None:
        """What is looked at when a cut is due, not at each step."""
        if self.param.device.type == "cpu" and self.param.is_shared():  # type: ignore[no-untyped-call]
            return "its memory is shared with other processes"
        return why(owner)

    def _lookups_unavailable_reason(self) -> str | None:
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


def _name(key: str, nth: int) -> str:
    """Canonical name of a state key: the innermost optimizer's as it is, its wrappers' with @1, @2, ..."""
    return f"{key}@{nth}" if nth else key
