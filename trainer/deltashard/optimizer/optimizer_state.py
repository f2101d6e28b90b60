"""Optimizer state by canonical name: read for a snapshot, written back at a restore.

Every torch optimizer that is passed in, or wrapped by one that is (Lookahead and similar), gets one view. A state value
of a table is of one of three kinds:

    row field   strided, [R] or [R, 1] (row-wise) or [R, D] (point-wise): stored with the rows, in the frames
    scalar      numbers, strings, 0-d tensors (`step`)                    } in the optimizer's blob
    other       tensors of any other shape, sparse buffers as they are    } in the optimizer's blob

Names are torch's own state keys. Values are in `optimizer.state[param]`, and many optimizers create them lazily. A
field that does not exist at a snapshot is not in the table's schema. When it appears, the whole table counts as
changed, so no chain of differentials lacks a field.

Restore does not use `load_state_dict`, which casts state to the parameter's type and keeps references to its input.
Values are written to `optimizer.state[param]` with their saved dtype, as separate copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any, cast

import torch
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.schema import FieldKind, FieldSpec
from torch import Tensor

from deltashard.errors import StateError
from deltashard.optim import RowWiseAdagrad
from deltashard.optimizer import hyperparameter
from deltashard.optimizer.attribute import Attributes
from deltashard.optimizer.whitelist import wrapped_optimizers
from deltashard.state.discovery import dtype_name

SUM_ONLY = (torch.optim.Adagrad, RowWiseAdagrad)
"""Optimizers whose only state is `sum`, unless rates decay by themselves."""
_FIELD_DTYPES = {
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
}  # fmt: skip


def field_kind(value: Any, rows: int, columns: int) -> FieldKind | None:
    """Return the kind of row field of a [rows, columns] table; None: the value is stored in the optimizer's blob."""
    if (
        not isinstance(value, Tensor)
        or value.layout != torch.strided
        or dtype_name(value.dtype) not in _FIELD_DTYPES
    ):
        return None
    shape = tuple(value.shape)
    if shape == (rows, columns):
        return "pointwise"
    if shape in ((rows,), (rows, 1)):
        return "rowwise"
    return None


class OptimizerView:
    """One optimizer's groups and state, under canonical parameter names."""

    is_partitioned = False
    """Whether each rank of a group holds another part and reports it itself; otherwise all hold the same."""

    def __init__(
        self,
        index: int,
        target: Any,
        names: Mapping[Tensor, str],
        tables: Iterable[str],
        fused: Collection[Tensor] = (),
    ) -> None:
        """`fused`: parameters updated by kernels. TorchRec scripts pass all parameters of a model to one optimizer."""
        self._fused = fused
        self.index = index
        self.target = target
        self._names = names
        self._tables = frozenset(tables)
        self.orphans: dict[str, Tensor] = {}
        """Parameters that the model does not hold (such as a temperature), saved and restored with this optimizer."""
        self.wrappers: list[Any] = []
        """Wrappers without separate state; their attributes are saved with this view."""
        self.restoring = False
        """Whether changes of its state come from a restore."""
        self.given: list[dict[str, Any]] = []
        """Hyperparameters of each group as set by the script, before training changed them."""
        self._attributes: list[Attributes] = []
        self._allocated: set[Tensor] = set()

    @staticmethod
    def merged(trees: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(next(iter(trees)))

    def watch_attributes(self, earlier: Iterable[OptimizerView] = ()) -> None:
        """Save attributes that change from now on; a view in `earlier` of the same optimizer keeps its baseline."""
        earlier = list(earlier)
        known = {id(a.target): a for view in earlier for a in view._attributes}  # noqa: SLF001 - same class
        given = next((view.given for view in earlier if view.target is self.target), None)
        if given is None:
            self.record_given()
        else:
            self.given = given
        params = self.params()
        self._attributes = [
            known.get(id(target)) or Attributes(target, params, self.state)
            for target in (self.target, *self.wrappers)
        ]

    def record_given(self) -> None:
        self.given = [hyperparameter.given(group) for group in self.target.param_groups]

    @property
    def unsaved(self) -> list[str]:
        return [f"{type(a.target).__name__}.{name}" for a in self._attributes for name in a.unsaved]

    @property
    def class_name(self) -> str:
        return f"{type(self.target).__module__}.{type(self.target).__qualname__}"

    @property
    def state(self) -> MutableMapping[Any, Any]:
        return cast("MutableMapping[Any, Any]", self.target.state)

    def params(self) -> dict[str, Tensor]:
        """Return {name: parameter} in the order of the groups, without parameters updated by kernels."""
        found: dict[str, Tensor] = {}
        for g, group in enumerate(self.target.param_groups):
            for j, param in enumerate(group["params"]):
                if param in self._fused:
                    continue
                name = self._names.get(param)
                if name is None:
                    name = f"optimizer{self.index}.{g}.{j}"
                    self.orphans[name] = param
                found[name] = param
        return found

    def fields(self, param: Tensor) -> dict[str, tuple[FieldKind, Tensor]]:
        entry = self.state.get(param)
        if not entry:
            return {}
        rows, columns = param.shape
        found = {}
        for key in sorted(entry, key=str):
            kind = field_kind(entry[key], rows, columns)
            if kind is not None:
                found[str(key)] = (kind, entry[key])
        return found

    def allocate(self, param: Tensor, spec: FieldSpec, key: str) -> Tensor:
        """Return the tensor to restore a row field into: the optimizer's own if it fits, else new zeros."""
        self._allocated.add(param)
        rows, columns = param.shape
        entry = self.state.get(param)
        if entry is None:
            entry = {}
            self.state[param] = entry
        dtype = getattr(torch, spec.dtype)
        live = entry.get(key)
        if isinstance(live, Tensor) and live.dtype == dtype and field_kind(live, rows, columns) == spec.kind:
            return live
        shape = (rows, columns) if spec.kind == "pointwise" else (rows,)
        entry[key] = torch.zeros(shape, dtype=dtype, device=param.device)
        return cast("Tensor", entry[key])

    def capture(self) -> dict[str, Any]:
        """Return everything but the row fields as one tree; its tensors are live, so encode it within the snapshot.

        Keys: `class`, `groups` (with parameter names), `state` {name: {key: value}}, `fields` {name: {key: shape
        without the rows}} of tables, `extra` (state under keys that are not parameters), `orphans`, `given` (see the
        attribute) and, unless empty, `beside`: `Attributes.capture` of the optimizer and of its wrappers.

        Raises:
            StateError: The optimizer has stepped a sharded table that a kernel updates.
        """
        if any(self.state.get(param) for param in self._fused):
            raise StateError(
                f"{type(self.target).__name__} has stepped a sharded table, which its kernel already updates: that "
                "state belongs to one rank's shard and cannot be restored",
                where=f"optimizer {self.index}",
                remedy="remove the parameters of sharded tables from this optimizer",
            )
        params = self.params()
        state: dict[str, dict[Any, Any]] = {}
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, param in params.items():
            entry = self.state.get(param)
            if entry is None:
                continue
            fields = self.fields(param) if name in self._tables else {}
            state[name] = {k: v for k, v in entry.items() if str(k) not in fields}
            if fields:
                shapes[name] = {k: tuple(t.shape[1:]) for k, (_, t) in fields.items()}
        names = {param: name for name, param in params.items()}
        beside = [a.capture(params, self.state) for a in self._attributes]
        return {
            **({"beside": beside} if any(beside) else {}),
            "class": self.class_name,
            "groups": [
                {
                    **{k: v for k, v in g.items() if k != "params"},
                    "params": [names[p] for p in g["params"] if p in names],
                }
                for g in self.target.param_groups
            ],
            "state": state,
            "fields": shapes,
            "extra": {k: v for k, v in self.state.items() if isinstance(k, str | int)},
            "orphans": dict(self.orphans),
            "given": self.given,
        }

    def capture_local(self) -> dict[str, Any]:
        """As `capture`, including what other ranks would report about parts that are on this rank."""
        return self.capture()

    def adopt_remote(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """Return `now`, of another rank, as this rank's; `then`: what the previous checkpoint has of all ranks."""
        del then
        return dict(now)

    def restore(
        self, tree: Mapping[str, Any], *, skip: Collection[str] = (), script: bool = False
    ) -> list[str]:
        """Write a captured tree back, after the row fields; returns notes on what did not match.

        State of the parameters in `skip`, whose shape has changed, is not restored. With `script`, hyperparameters that
        this script sets differently from the one that saved keep this script's values.

        Raises:
            UserError: The groups do not match the saved ones.
        """
        self.restoring = True
        try:
            return self._restore(tree, skip, script=script)
        finally:
            self.restoring = False
            self._allocated.clear()

    def _restore(self, tree: Mapping[str, Any], skip: Collection[str], *, script: bool) -> list[str]:  # noqa: C901
        notes: list[str] = []
        mine = self.class_name
        if tree["class"] != mine:
            notes.append(f"optimizer {self.index} was a {tree['class']} and is a {mine} now")
        params = self.params()
        notes += self._restore_groups(tree, script=script)
        for name, param in params.items():
            if name in skip:
                continue
            saved, shapes = tree["state"].get(name), tree["fields"].get(name, {})
            if saved is None:
                # Rows of another optimizer (a fused one, which stores no other state) may be all that this one needs.
                if param not in self._allocated or type(self.target) not in SUM_ONLY:
                    self.state.pop(param, None)
                continue
            live = self.state.get(param)
            entry = live if live is not None else {}
            for key in [k for k in entry if k not in saved and str(k) not in shapes]:
                del entry[key]
            for key, value in saved.items():
                entry[key] = self._copy_to_device(value, param, entry.get(key))
            for key, tail in shapes.items():
                if key in entry:
                    entry[key] = entry[key].view(param.shape[0], *tail)
            self.state[param] = entry
        notes += [
            f"saved optimizer state of {name} has no parameter now"
            for name in tree["state"]
            if name not in params
        ]
        self.state.update(tree["extra"])
        for name, value in tree["orphans"].items():
            if name in self.orphans and name not in skip:
                with torch.no_grad():
                    self.orphans[name].copy_(value)
        beside = tree.get("beside", ())
        if len(beside) > len(self._attributes):
            notes.append(
                f"optimizer {self.index} is not wrapped any more: attributes of its wrapper are not restored"
            )
        for attributes, saved in zip(self._attributes, beside, strict=False):
            notes += attributes.restore(saved, params, self.state)
        return notes

    def _restore_groups(self, tree: Mapping[str, Any], *, script: bool) -> list[str]:
        saved, groups = tree["groups"], self.target.param_groups
        if len(groups) != len(saved):
            raise UserError(
                f"{len(saved)} parameter groups were saved, the optimizer has {len(groups)}",
                where=f"optimizer {self.index}",
                remedy="build the optimizer as it was, or restore with weights_only=True",
            )
        notes: list[str] = []
        names = {param: name for name, param in self.params().items()}
        by_names = {frozenset(g["params"]): i for i, g in enumerate(saved)}
        in_force, stored = list(self.given), tree.get("given", ())  # an imported checkpoint has none
        for i, group in enumerate(groups):
            source = by_names.get(frozenset(names[p] for p in group["params"] if p in names), i)
            changed: dict[str, tuple[Any, Any]] = {}
            if i < len(self.given) and source < len(stored):
                changed = hyperparameter.differences(stored[source], self.given[i])
                in_force[i] = self.given[i] if script else stored[source]
            kind = f"optimizer {self.index} ({type(self.target).__name__})"
            where = f"{kind}, parameter group {i}" if len(groups) > 1 else kind
            notes += hyperparameter.note(where, changed, script=script)
            for key, value in saved[source].items():
                if key == "params" or (script and key in changed):
                    continue
                live = group.get(key)
                if isinstance(live, Tensor) and isinstance(value, Tensor):
                    with torch.no_grad():
                        live.copy_(value)  # a scheduler may hold this very tensor
                else:
                    group[key] = value.clone() if isinstance(value, Tensor) else value
        self.given = in_force
        return notes

    def _copy_to_device(self, value: Any, param: Tensor, live: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(live, Tensor):
            device = live.device
        elif value.dim() == 0 and not self._scalars_on_device(param):
            device = torch.device("cpu")  # where torch keeps `step`
        else:
            device = param.device
        return value.detach().to(device, copy=True)

    def _scalars_on_device(self, param: Tensor) -> bool:
        for group in self.target.param_groups:
            if any(p is param for p in group["params"]):
                return bool(group.get("capturable") or group.get("fused"))
        return False


def views_of(
    optimizers: Iterable[Any],
    names: Mapping[Tensor, str],
    tables: Iterable[str],
    fused: Collection[Tensor] = (),
) -> list[OptimizerView]:
    """Return one view per distinct state in `optimizers` and what they wrap, outermost first."""
    tables = tuple(tables)
    views: list[OptimizerView] = []
    by_state: dict[int, OptimizerView] = {}
    for optimizer in optimizers:
        inner = wrapped_optimizers(optimizer)
        targets = [optimizer, *(o for o in inner if o is not optimizer)]
        bare = []
        for target in targets:
            if not isinstance(getattr(target, "state", None), MutableMapping) or not hasattr(
                target, "param_groups"
            ):
                bare.append(target)
                continue
            # A wrapper that exposes the inner optimizer's own state is not a second state.
            known = by_state.get(id(target.state))
            if known is not None:
                if target is not known.target and target not in known.wrappers:
                    known.wrappers.append(target)
                continue
            by_state[id(target.state)] = view = OptimizerView(len(views), target, names, tables, fused)
            views.append(view)
            view.wrappers, bare = bare, []
    return views
