"""The state of fused optimizers, as one more optimizer of the program: nobody hands it over, the model holds it.

Row fields have the names and meanings of the optimizers of torch and of ours: `sum` of fused Adagrad is point-wise
[R, D], that of fused row-wise Adagrad is one value a row [R], as in `RowWiseAdagrad`. TorchRec describes the row-wise
state of column shards as if it lay behind one another; here it is a field of the shard's box, like every other.

What kernels keep beside rows is stored by table, since which tables share a kernel is the sharding's. Of a table whose
shards lie in several kernels or processes, the one with row 0 and column 0 speaks: trees of all ranks have no table in
common, and `merged` makes one of them.

A table that leaves its kernel (planned to be data-parallel, say) takes its state along to an optimizer with the very
same rule, and to no other; one that enters a kernel finds its state where the names and shapes are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.schema import FieldSpec
from torch import Tensor

from deltashard.optim import RowWiseAdagrad
from deltashard.optimizer import hyperparameter
from deltashard.optimizer.optimizer_state import OptimizerView, field_kind
from deltashard.sharded.batched_kernel import BatchedKernel, KernelShard
from deltashard.state.discovery import Inventory, dtype_name

_SAME_RULE: Mapping[str, type] = {
    "exact_sgd": torch.optim.SGD,
    "exact_adagrad": torch.optim.Adagrad,
    "exact_row_wise_adagrad": RowWiseAdagrad,
}
"""Fused optimizer -> the one that keeps the same state of a table, by the same name."""


class FusedOptimizer:
    """All fused optimizers of a model, with the face of one: a group of shards, and state by shard."""

    def __init__(self, inventory: Inventory) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """Shard -> state by canonical key, the kernels' own memory."""
        self.tables: dict[str, list[BatchedKernel]] = {}
        """Kernels by the table of which they hold a shard."""
        self.first: dict[str, BatchedKernel] = {}
        """The kernel that speaks for a table, where it is here."""
        for found in inventory.tables.values():
            if not isinstance(found.kernel, KernelShard):
                continue
            self.state[found.param] = dict(found.kernel.state)
            self.tables.setdefault(found.fqn, []).append(found.kernel.batch)
            if (found.box.row_start, found.box.col_start) == (0, 0):
                self.first[found.fqn] = found.kernel.batch

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group; the rate a scheduler began with, where one was built."""
        group: dict[str, Any] = {"params": list(self.state)}
        for kernel in self.first.values():
            group |= {k: v for k, v in kernel.group.items() if k == "initial_lr"}
        return [group]


class FusedView(OptimizerView):
    """See `OptimizerView`; of the kernels of `inventory`."""

    target: FusedOptimizer
    is_partitioned = True

    def __init__(self, others: Sequence[OptimizerView], inventory: Inventory) -> None:
        super().__init__(len(others), FusedOptimizer(inventory), inventory.names, inventory.tables)
        self._others = others
        self.record_given()

    @property
    def class_name(self) -> str:
        return "deltashard.FusedOptimizer"

    def record_given(self) -> None:
        kernels = {fqn: held[0] for fqn, held in self.target.tables.items()}
        self.given = [{fqn: kernel.hyperparameters for fqn, kernel in kernels.items()}]

    def watch_attributes(self, earlier: Iterable[OptimizerView] = ()) -> None:
        self.given = next((view.given for view in earlier if isinstance(view, FusedView)), self.given)

    def allocate(self, param: Tensor, spec: FieldSpec, key: str) -> Tensor:
        """The kernel's own memory for a row field about to be restored.

        Raises:
            UserError: the kernel has no such state.
        """
        live: Tensor | None = self.state[param].get(key)
        rows, columns = param.shape
        kind = None if live is None else field_kind(live, rows, columns)
        if live is None or kind != spec.kind or dtype_name(live.dtype) != spec.dtype:
            has = "none" if live is None else f"it {kind} of {dtype_name(live.dtype)}"
            raise UserError(
                f"{spec.name!r} is stored {spec.kind} of {spec.dtype}, the fused optimizer has {has}",
                where=self._names[param],
                remedy="choose the fused optimizer and the kind of sharding that it was saved with "
                "(ParameterConstraints), or restore with weights_only=True",
            )
        return live

    def capture(self) -> dict[str, Any]:
        return self._captured(self.target.first)

    def capture_local(self) -> dict[str, Any]:
        return self._captured({fqn: kernels[0] for fqn, kernels in self.target.tables.items()})

    def adopt_remote(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """See `OptimizerView`: all ranks step alike, so that kernels which were alike then are alike now.

        Of a table that the other rank has no shard of, it is what became of one that was equal to it.
        """
        said, found = now["state"], {}
        for fqn, was in then["state"].items():
            like = (other for other in said if then["state"].get(other) == was)
            found[fqn] = said[fqn] if fqn in said else next((said[other] for other in like), was)
        spoken: dict[BatchedKernel, Any] = {}
        for fqn, kernels in self.target.tables.items():  # tables of one kernel have one rate and one count
            for kernel in kernels if fqn in found else ():
                found[fqn] = spoken.setdefault(kernel, found[fqn])
        return {**then, "state": found}

    def _captured(self, kernels: Mapping[str, BatchedKernel]) -> dict[str, Any]:
        return {
            "class": self.class_name,
            "groups": [{"params": sorted(kernels)}],
            "state": {fqn: kernel.capture() for fqn, kernel in kernels.items()},
            "fields": {},
            "extra": {},
            "orphans": {},
            "given": [{fqn: held for fqn, held in self.given[0].items() if fqn in kernels}],
        }

    @staticmethod
    def merged(trees: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """One tree of what the views of all ranks captured (at least one): each table's is the one that is there."""
        found: dict[str, Any] = {}
        for tree in trees:
            found = found or {**tree, "state": {}, "given": [{}]}
            found["state"] |= tree["state"]
            found["given"][0] |= tree["given"][0]
        found["groups"] = [{"params": sorted(found["state"])}]
        return found

    def _restore(self, tree: Mapping[str, Any], skip: Collection[str], *, script: bool) -> list[str]:
        saved: Mapping[str, Any] = tree["state"]
        notes = [
            f"nothing is stored of the kernel of {fqn}" for fqn in self.target.tables if fqn not in saved
        ]
        self._check_moved_tables(
            {fqn: saved[fqn]["optimizer"] for fqn in saved.keys() - self.target.tables.keys()}
        )
        by_kernel: dict[BatchedKernel, str] = {}
        for fqn, kernels in self.target.tables.items():
            for kernel in kernels if fqn in saved and fqn not in skip else ():
                if kernel.optimizer != saved[fqn]["optimizer"]:
                    raise UserError(
                        f"It was updated by {saved[fqn]['optimizer']} and is by {kernel.optimizer}",
                        where=fqn,
                        remedy="build it with the fused optimizer of then, or restore with weights_only=True",
                    )
                other = by_kernel.setdefault(kernel, fqn)
                if saved[other] != saved[fqn]:
                    raise UserError(
                        f"It shares a kernel with {other} now, and their learning rates, or counts, were different",
                        where=fqn,
                        remedy="give both tables fused_params that keep them apart, as they were",
                    )
        for kernel, fqn in by_kernel.items():
            was, now = tree["given"][0].get(fqn, {}), self.given[0][fqn]
            changed = hyperparameter.differences(was, now)
            notes += hyperparameter.note(f"fused optimizer of {fqn}", changed, script=script)
            kernel.restore(saved[fqn])
            if script and changed:
                kernel.set_hyperparameters({name: this for name, (_, this) in changed.items()})
        if not script:
            self.given[0] |= {fqn: was for fqn, was in tree["given"][0].items() if fqn in self.given[0]}
        return notes

    def _check_moved_tables(self, left: Mapping[str, str]) -> None:
        """Raise `UserError` for a table that left its kernel (`left`: by its optimizer then) for one unlike it."""
        for fqn, was in left.items():
            for view in self._others:
                group = next((g for g in view.target.param_groups if self._held(g, fqn)), None)
                if group is None:
                    continue
                plain = not any(group.get(name) for name in ("momentum", "lr_decay"))
                if type(view.target) is not _SAME_RULE.get(was) or not plain:
                    raise UserError(
                        f"It was updated by the fused {was} and is by {type(view.target).__name__} now, whose state "
                        "is another",
                        where=fqn,
                        remedy="constrain the planner to the kind of sharding that it was saved with "
                        "(ParameterConstraints(sharding_types=...)), or restore with weights_only=True",
                    )

    def _held(self, group: Mapping[str, Any], fqn: str) -> bool:
        return any(self._names.get(param) == fqn for param in group["params"])
