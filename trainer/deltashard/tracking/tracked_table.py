"""One shard of a table: its live tensors, its marks and its tracker.

Marks, hashes and samples refer to the shard's own rows; schemas and boxes to the whole table. The tracker is chosen
here
and may change during training:

    gradients  exactly one optimizer owns the table, it is on the whitelist (checked before every step), its gradients
               are sparse, and no lookup renormalises (max_norm)
    lookups    a fused kernel updates the table within the backward pass and changes only rows of the lookup
    hashes     all other tables, and small tables, for which hashing per snapshot costs less than work per step

A table falls back to hashes permanently if the whitelist no longer applies, the changed rows cannot be proven, an audit
fails, or the table is written from outside repeatedly. All its rows are marked then, so nothing is missed, and the
reason
is logged once. A single write from outside (a version counter or address that changed between the hooks, an optimizer's
`load_state_dict`) marks all rows.
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
    """Settings that select tables and their trackers."""

    tables: TableSettings = field(default_factory=TableSettings)
    hash_below_bytes: int = 256 << 10
    """Tables whose weights take fewer bytes are tracked by hashes at each snapshot. Default: 256 KiB."""
    audit_rows: int = 2048
    """Rows sampled per table and snapshot (see `audit`); 0 disables the audit. Default: 2048.

    A table with at most this many rows (and at most its share of `audit_rows_in_all`) is compared completely, at each
    snapshot and on the training thread. Smaller samples are hashed and compared while training continues, if rows are
    copied ahead of snapshots.
    """
    audit_rows_in_all: int = 8192
    """Rows sampled over all tables, shared equally, since each row costs a memory access. Default: 8192."""
    outside_writes: int = 2
    """Number of writes from outside after which a table is tracked by hashes. Default: 2."""
    seed: int = 0x5EED
    """Seed of the hashes and of the audit's samples."""

    def audited_rows(self, rows: int, tables: int) -> int:
        """Return the sample size for a table with `rows` rows among `tables` tables."""
        return min(self.audit_rows, max(1, self.audit_rows_in_all // tables), rows)


class TrackedTable:  # noqa: PLR0904
    """One shard of a table: its live tensors, the marks of its rows, and its tracker."""

    def __init__(self, found: FoundTable, settings: TrackingSettings, *, saver: int | None = None) -> None:
        """`saver` is the other rank that saves this shard; such a shard is not tracked here."""
        self.fqn = found.fqn
        self.key = found.key
        """Name of the shard."""
        self.box = found.box
        """Region of the table that the shard covers."""
        self.found = found
        self.param = found.param
        self.lookups = found.lookups
        """Modules that look up the table."""
        self.aliases = found.aliases
        self.marks = Marks(found.param.shape[0], found.param.device)
        self.views: list[OptimizerView] = []
        """Views that hold state of this table, innermost first."""
        self.sole: Any = None
        """The optimizer that alone owns this table, if there is one."""
        self.reason = ""
        """Reason why the table is tracked by hashes; empty otherwise."""
        self.schema_version = 0
        self.saver = saver
        """Other rank that saves this replica; None if this process does."""
        self._settings = settings
        self._seed = settings.seed ^ zlib.crc32(found.key.encode())
        self._tracker: Tracker | None = None
        self._audit = Audit(found.key, self._seed)
        self._audits_all = False
        """Whether the sample covers all rows and is therefore read only at snapshots."""
        self.samples = 0
        self._outside = 0
        self._shares: str | None = None
        self.signed: Signed = _UNSIGNED
        """Signature of weights and state at the last check; differences from it are writes from outside."""
        self._pinned: list[Any] = []
        self._stride = found.param.stride()
        self._schema = self._read_schema()

    @property
    def schema(self) -> TableSchema:
        """Schema of the whole table at the last `refresh`; `schema_version` counts its changes."""
        return self._schema

    @property
    def tracker(self) -> str:
        """Name of the tracker: "gradients", "lookups" or "hashes"."""
        return "hashes" if self._tracker is None else self._tracker.name

    @property
    def watched(self) -> bool:
        """Whether rows are marked as they change, based on knowledge of the writers."""
        return self._tracker is not None and self._tracker.name != "hashes"

    def state_tensors(self) -> dict[str, Tensor]:
        """Live row-wise fields in schema order: [R], [R, 1] or [R, D], possibly on another device than `param`."""
        return {name: tensor for name, (_, tensor) in self._fields().items()}

    def allocate_state(self, spec: FieldSpec) -> Tensor:
        """Return the live tensor into which restored values of `spec` are scattered; see `OptimizerView.allocate`.

        Raises:
            UserError: No optimizer owns this table, or its owner has other state.
        """
        owner = self.owner_of(spec)
        if owner is None:
            raise UserError(
                f"The checkpoint holds optimizer state {spec.name!r}, which no optimizer of this run owns",
                where=self.fqn,
                remedy="pass the optimizer to the Checkpointer, or restore with weights_only=True",
            )
        return owner.allocate(self.param, spec, spec.name.partition("@")[0])

    def owner_of(self, spec: FieldSpec) -> OptimizerView | None:
        """Return the optimizer that holds the row-wise field `spec`, by its stored name, if there is one."""
        nth = int(spec.name.partition("@")[2] or 0)
        return self.views[nth] if nth < len(self.views) else None

    def select_rows(self, mode: Mode) -> RowSelection:
        """Return the rows that a snapshot of this mode takes, as of the last `Tracking.refresh`."""
        return self.marks.select(mode)

    def attach(self, owners: Iterable[Any], views: Iterable[OptimizerView]) -> None:
        """Set the user's optimizers that own this table, and the views that hold its state."""
        if self.watched and self._differs():
            self._written_outside()  # before `sign` below accepts the write
        first = self._tracker is None
        self.views = list(views)[::-1]
        owners = list(owners)
        sole = owners[0] if len(owners) == 1 else None
        if not first and sole is not self.sole:
            self.marks.mark_all()  # earlier steps of the new owner were not tracked
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
        if first:  # later changes of the schema are detected by `refresh`
            self._schema = self._read_schema()
        self.sign()

    def fall_back_to_hashing(self, reason: str, *, quiet: bool = False) -> None:
        if isinstance(self._tracker, HashTracker) or self.saver is not None:
            return
        self.close()
        self.signed, self._pinned = _UNSIGNED, []
        self._tracker = HashTracker(self._seed)
        if not in_graph(self.param):  # the first hashing marks all rows anyway
            self.marks.mark_all()
        self.reason = reason
        level = logging.DEBUG if quiet else logging.INFO
        _log.log(level, "table %s is tracked by row hashes at each snapshot: %s", self.key, reason)

    def before_step(self, inexact: str | None) -> None:
        """Check, before the sole owner's step, that the whitelist applies and the table was not written from outside.

        `inexact` is the result of `inexact_reason` and `foreign_hook_reason` for the owner.
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
        """Accept the writes of the sole owner's step."""
        if not self.watched:
            return
        signature, (seen, part) = Signature(self.signable()), self.signed
        if signature.addresses != seen.addresses[part]:
            self.sign()  # pins state that was created or rebound within the step
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
        """Whether the optimizer's step is being captured; the table then falls back to hashes and nothing is marked.

        A mark would become part of the graph and write flags at each replay, even after they were freed.
        """
        if not in_graph(self.param):
            return False
        self.fall_back_to_hashing("its optimizer runs inside a CUDA graph, which runs no hooks")
        return True

    def on_tracking_error(self, error: Exception) -> None:
        """Fall back to hashes after an error in tracking, for example because the weight was resized in place."""
        self.fall_back_to_hashing(f"its changed rows cannot be determined ({type(error).__name__}: {error})")

    def refresh(self, why: _WhyReplaced) -> None:
        """Update marks and schema for a snapshot; hashing follows.

        `why` is `replaced_step_reason`, possibly cached for this snapshot.
        """
        self.mark_if_written()
        if self.watched and self.marks.flags.device != self.param.device:
            self.fall_back_to_hashing("it moved to another device")
        if (
            self.tracker == "gradients"
            and (reason := self._gradient_tracking_blocked_reason(self.sole, why)) is not None
        ):
            self.fall_back_to_hashing(reason)
        if self.param.stride() != self._stride:  # a change that versions and addresses do not show
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
        """After `refresh`, begin to hash a table that is tracked by hashes; `end_hashing` completes it."""
        return None if self._tracker is None else self._tracker.begin(self._sections())

    def end_hashing(self, hashing: Hashing) -> None:
        if self._tracker is not None:
            self._tracker.end(hashing, self._sections(), self.marks)

    def reseed(self, ids: Tensor | None) -> None:
        """Reset the marks after a restore; `ids` (int64 [n], or None for all rows) came from delta frames."""
        self._schema = self._read_schema()
        self.marks.reseed(ids)
        self._audit.forget()
        if self._tracker is not None:
            self._tracker.adopt(self._sections())
        self.sign()

    def audit_draw(self, tables: int) -> Callable[[], None] | None:
        """Draw the audit's next sample, as one of `tables` tables; return a job that hashes the rows.

        A sample of all rows is hashed here, so that it misses no write that is concurrent with another thread.
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
        """Return a job that compares the sample on another thread; None without a sample or if it has all rows."""
        return self._audit.ahead(self._sections()) if self.watched and not self._audits_all else None

    def audit_check(self, *, ahead: bool = False) -> AuditFault | None:
        """Check the sample, or use the comparison made ahead; a fault makes the table fall back to hashes."""
        if not self.watched or self._differs():
            return None  # a detected write from outside is no fault: `refresh` marks all rows
        fault = self._audit.check(self._sections(), self.marks, ahead=ahead)
        if fault is not None:
            self.fall_back_to_hashing("an audit found rows that changed unseen")
        return fault

    def check_unmarked_rows(self, rows: Tensor) -> AuditFault | None:
        """Before `refresh`: check `rows` (int64 [n]) whose stored values in the last snapshot were wrong.

        Rows that were not marked since are a fault, as in `audit_check`.
        """
        if not self.watched or self._differs():
            return None
        wrong = rows[self.marks.clean(rows)].tolist()
        if not wrong:
            return None
        self.fall_back_to_hashing(
            "rows were copied while they were written untracked (through .data), and have been changed back since"
        )
        return AuditFault(table=self.key, rows=tuple(wrong[:16]), found=len(wrong), checked=len(rows))

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    def update_found(self, found: FoundTable) -> None:
        """Update the lookups and aliases of the same parameter."""
        self.found, self.lookups, self.aliases = found, found.lookups, found.aliases

    def shared_with(self, other: str | None) -> None:
        """Set the name of the owner of shared memory, whose steps write these rows, too."""
        self._shares = other
        if other is not None and self._tracker is not None:
            self.fall_back_to_hashing(self._shared_reason(other))

    @staticmethod
    def _shared_reason(other: str) -> str:
        return f"it shares its memory with {other}"

    def matches(self, found: FoundTable) -> bool:
        """Whether `found`, of the same name, has the shape and dtype of this table."""
        return found.box == self.box and dtype_name(found.param.dtype) == self._schema.dtype

    def rebind(self, found: FoundTable) -> None:
        """Switch to another parameter of the same shape, after the model replaced it or its module."""
        self.update_found(found)
        self.param = found.param
        _log.warning(
            "the parameter of table %s was replaced: all its rows are saved as new content. "
            "Pass the new parameter to the optimizer",
            self.fqn,
        )
        self.fall_back_to_hashing("its parameter was replaced", quiet=True)
        self.marks.mark_all()

    def sign(self) -> None:
        """Accept the current versions and addresses.

        The memory is pinned until the next call, so that a recorded address cannot be reused by another tensor.
        """
        if not self.watched:
            self.signed, self._pinned = _UNSIGNED, []
            return
        tensors = self.signable()
        self.signed = (Signature(tensors), _WHOLE)
        self._pinned = [t.untyped_storage() for t in tensors if t.layout == torch.strided]

    def mark_outside(self) -> None:
        """Record a write to this table or its state outside of an optimizer's step."""
        if self.watched:
            self._written_outside()
            self.sign()

    def mark_if_written(self) -> None:
        if self.watched and self._differs():
            self.mark_outside()

    def rewritten(self) -> None:
        """Mark all rows after writing the state ourselves."""
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
        # A wrapper that is not a torch optimizer is not on the whitelist either.
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
        """Reasons that are checked at snapshots instead of at each step."""
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
        """Return the signed tensors: weights, then the optimizers' state in the order of the names."""
        state = [e[key] for e in self.entries() for key in sorted(e, key=str)]
        return [self.param, *(value for value in state if isinstance(value, Tensor))]

    def entries(self) -> list[Mapping[Any, Any]]:
        """Return the optimizers' state of this table, innermost first."""
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
    """Return the canonical name of a state key: the key, with @1, @2, ... for the wrappers of an optimizer."""
    return f"{key}@{nth}" if nth else key
