"""Report of `Checkpointer.doctor()`: how each table is tracked and why, and what is and is not saved.

`ckpt.doctor()` is meant to be printed. It inspects the program and changes nothing. The Checkpointer logs one line of
it
when it attaches. Entries under `missing` are hints, not errors: a plain attribute with a tensor may be a cache, and the
program may resume a loader itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deltashard_checkpoint.codecs import kernel_choice
from deltashard_proto.v1 import trainer_pb2 as pb
from torch import Tensor, nn

from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.program import Program
from deltashard.save.watchdog import BlockedSave
from deltashard.state.discovery import canonical_prefixes
from deltashard.state.managed_collision import COLLISIONS_PREFIX, is_managed
from deltashard.tracking.tracking import TrackedTable

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_MAX_NAMES = 8
_MAX_EXAMINED = 1_000
"""Examined values per list or dict. A collection of tensors usually starts with one; a vocabulary may have millions."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that torch itself sets on a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """Shape, optimizer and tracker of one table."""

    name: str
    rows: int
    columns: int
    dtype: str
    bytes: int
    """Size in memory of weights and optimizer state."""
    fields: tuple[str, ...]
    """Names of the row-wise optimizer state that exists so far."""
    optimizer: str
    """Class of the optimizer that steps the table, or a note that none does."""
    tracker: str
    """"gradients", "lookups" or "hashes"."""
    why: str
    """Reason for the choice of tracker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """State that is not in the checkpoint."""

    what: str
    meaning: str
    """Consequence for a resumed run, and the remedy."""
    later: bool = False
    """Whether the program may still register it after the Checkpointer was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Printable result of `Checkpointer.doctor()`."""

    tables: tuple[TableReport, ...]
    saved: tuple[str, ...]
    """Contents of the checkpoint other than tables, one line per kind."""
    missing: tuple[Missing, ...]
    timer: str = ""
    """Current save interval, and the goal from which it was chosen."""
    blocked: str = ""
    """Reason why a due save is blocked; empty if no save is due."""
    kernels: str = ""
    """Warning that slow kernels read and hash rows, with the remedy; empty otherwise."""

    @property
    def line(self) -> str:
        size = _size(sum(table.bytes for table in self.tables))
        count = Counter(table.tracker for table in self.tables)
        lookups = f", by lookups {count['lookups']}" if count["lookups"] else ""
        tables = (
            f"{len(self.tables)} tables ({size}; tracked by gradients {count['gradients']}{lookups}, "
            f"by row hashes {count['hashes']})"
        )
        parts = [tables, *self.saved]
        known = [each.what for each in self.missing if not each.later]
        if known:
            parts.append(f"not saved: {_join_names(known)}")
        return "; ".join(parts) + " (ckpt.doctor() prints details)"

    def __str__(self) -> str:
        lines = [f"Tables: {len(self.tables)}"]
        for table in self.tables:
            shape, state = f"[{table.rows}, {table.columns}]", ", ".join(table.fields) or "none yet"
            lines.append(f"  {table.name}  {shape} {table.dtype}, {_size(table.bytes)}, state: {state}")
            lines.append(f"    {table.optimizer}; changed rows by {table.tracker}: {table.why}")
        lines += ["In the checkpoint as well:", *(f"  {each}" for each in self.saved)]
        lines.append("Not in the checkpoint:")
        for each in self.missing:
            lines += [f"  {each.what}", f"    {each.meaning}"]
        lines += [
            "  state held only by variables of the script: unwrapped loaders, generators, counters",
            "    doctor() cannot see it: wrap() loaders, pass other state in state=.",
        ]
        if self.timer:
            lines.append(f"Saved {self.timer}.")
        if self.blocked:
            lines.append(f"Blocked: {self.blocked}")
        if self.kernels:
            lines.append(f"Slow: {self.kernels}")
        return "\n".join(lines)


def diagnose(
    program: Program,
    loaders: Mapping[str, WrappedLoader],
    policy: pb.Policy | None = None,
    *,
    blocked: BlockedSave | None = None,
) -> Diagnosis:
    """Inspect what a snapshot taken now would and would not contain.

    Args:
        program: Program being trained.
        loaders: Wrapped loaders by name.
        policy: Last known policy of the sidecar.
        blocked: Due save that has not been taken yet.
    """
    tracking, contracts = program.tracking, program.contracts
    dense = tracking.dense()
    named = {contract.source.name for contract in contracts}
    histories = [each.name for each in program.sources if each.name.startswith(COLLISIONS_PREFIX)]
    given = [source.name for source in program.sources if source.name not in named | {*histories}]
    params = [name for name, tensor in dense.items() if isinstance(tensor, nn.Parameter)]
    size = _size(sum(_bytes(tensor) for tensor in dense.values()))
    saved = [f"{len(params)} dense parameters and {len(dense) - len(params)} buffers ({size})"]
    if tracking.optimizers:
        saved.append(
            f"optimizers: {_join_names(view.class_name.rpartition('.')[2] for view in tracking.optimizers)}"
        )
    if contracts:
        saved.append(f"extra state of modules: {_join_names(each.name for each in contracts)}")
    if histories:
        saved.append(
            f"histories of managed collisions: {_join_names(n.removeprefix(COLLISIONS_PREFIX) for n in histories)}"
        )
    saved.append(f"state=: {_join_names(given)}" if given else "no state=")
    if loaders:
        saved += [f"position of loader {name!r}: {loader.guarantee}" for name, loader in loaders.items()]
    saved.append("global random generators")
    return Diagnosis(
        tables=tuple(_table(table) for table in tracking.tables),
        saved=tuple(saved),
        missing=tuple(_missing(program, loaders)),
        timer="" if policy is None else timer_of(policy),
        blocked="" if blocked is None else str(blocked),
        kernels=kernel_choice.SLOW_MESSAGE if kernel_choice.is_slow() else "",
    )


def timer_of(policy: pb.Policy) -> str:
    intervals = [f"every {policy.every_s:.4g} s"] if policy.every_s else []
    if policy.every_steps:
        intervals.append(f"every {policy.every_steps} steps")
    timer = " and ".join(intervals) or "on demand only"
    if not policy.goal or policy.goal == "fixed":
        return timer
    if not intervals:  # no attempt is open yet
        timer = "at an interval that is chosen when training starts"
    return f"{timer} (goal {policy.goal})"


def _held(value: object) -> Iterator[Tensor]:
    """Yield the tensors of an attribute value, or the tensors in it if it is a list, tuple or dict."""
    values = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    )
    return (each for each in itertools.islice(values, _MAX_EXAMINED) if isinstance(each, Tensor))


def _table(table: TrackedTable) -> TableReport:
    owners = [type(view.target).__name__ for view in table.views]
    schema = table.schema
    state = table.state_tensors()
    return TableReport(
        name=table.key,
        rows=schema.rows,
        columns=schema.columns,
        dtype=schema.dtype,
        bytes=_bytes(table.param) + sum(_bytes(tensor) for tensor in state.values()),
        fields=tuple(state),
        optimizer=f"stepped by {' in '.join(owners)}" if owners else "no optimizer given here steps it",
        tracker=table.tracker,
        why=table.reason or _why(table, owners[0] if owners else "its optimizer"),
    )


def _why(table: TrackedTable, owner: str) -> str:
    if table.tracker == "lookups":
        return "its kernel changes only rows that were looked up, and reports them at each update"
    return f"{owner} changes only rows that have a gradient"


def _missing(program: Program, loaders: Mapping[str, WrappedLoader]) -> Iterator[Missing]:
    tracking, contracts = program.tracking, program.contracts
    transient, plain = [], []
    known = {id(tensor) for tensor in tracking.inventory.names}
    theirs = {id(each) for module in tracking.inventory.sharded for each in module.modules()}
    for path, module in canonical_prefixes(tracking.model):
        # A sharded module rebuilds other state from its plan; the history of managed collisions is saved.
        if id(module) in theirs or is_managed(module):
            continue
        inside = f"{path}." if path else ""
        buffers = module._buffers  # noqa: SLF001 - torch offers no accessor to what does not persist
        transient += [
            f"{inside}{name}"
            for name in sorted(module._non_persistent_buffers_set)  # noqa: SLF001
            if buffers.get(name) is not None
        ]
        plain += [
            f"{inside}{name}"
            for name, value in vars(module).items()
            if name not in _MODULE_ATTRIBUTES and any(id(tensor) not in known for tensor in _held(value))
        ]
    if transient:
        yield Missing(
            what=f"buffers with persistent=False: {_join_names(transient)}",
            meaning="they have their constructed values after a restore, which is right if they never change",
        )
    if plain:
        yield Missing(
            what=f"tensors in plain attributes: {_join_names(plain)}",
            meaning="they have their constructed values after a restore: register_buffer() them, or return them from "
            "get_extra_state()",
        )
    left_out = sorted(itertools.chain.from_iterable(contract.left_out for contract in contracts))
    if left_out:
        yield Missing(
            what=f"tensors that modules exclude from state_dict(): {_join_names(left_out)}",
            meaning="excluded by the module itself; constructed values after a restore",
        )
    if attributes := [name for view in tracking.optimizers for name in view.unsaved]:
        yield Missing(
            what=f"attributes of optimizers that a checkpoint cannot store: {_join_names(attributes)}",
            meaning="constructed values after a restore: use plain values or tensors, or state_dict()",
        )
    if not loaders:
        yield Missing(
            what="the position in the data",
            meaning="no loader is wrapped: a resumed run reads its data from the beginning; loader = ckpt.wrap(loader)",
            later=True,
        )
    if (owner := program.unsaved_scheduler()) is not None:
        yield Missing(
            what=f"the learning-rate scheduler of {owner}",
            meaning='it restarts after a restore and overwrites the rate: pass state={"scheduler": scheduler}',
        )
    if not tracking.optimizers:
        yield Missing(
            what="optimizer state",
            meaning="no optimizer was given: optimizer= takes one, or a list of them",
        )
        return
    stepped = {id(p) for view in tracking.optimizers for g in view.target.param_groups for p in g["params"]}
    trained = {table.key: table.param for table in tracking.tables} | tracking.inventory.dense
    idle = [name for name, p in trained.items() if p.requires_grad and id(p) not in stepped]
    if idle:
        yield Missing(
            what=f"optimizer state of {_join_names(idle)}",
            meaning="they require gradients, and no optimizer given here steps them; their values are saved",
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if count >= unit), (1, "B"))
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} B"


def _join_names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMES} more" if len(listed) > _MAX_NAMES else ""
    return ", ".join(listed[:_MAX_NAMES]) + more
