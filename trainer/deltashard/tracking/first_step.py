"""Check after a restore that the first optimizer step keeps the restored state.

Some optimizers create their state at their first step, even if it exists already. Rows whose restored state differs
from that of most rows are remembered and compared after the step of the optimizer that owns them. Among rows without a
gradient, state was recreated if it has become one constant (the value of untouched rows, or any value if it was not
constant before) or a copy of the weights. Decay (Adam, RMSprop) keeps different values different.

A copy of the weights counts only for rows whose weights are as restored: where the weights changed, a wrapper
(Lookahead) may have set both to one value. Recreated state is reported and counted, and training continues with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deltashard.tracking.tracked_table import TrackedTable

_log = logging.getLogger("deltashard.tracking")

_SAMPLE_SIZES = (1 << 10, 1 << 13, 1 << 16)
"""Numbers of rows searched for rows worth remembering; the next number is used if few were found."""
_FEW, _REMEMBERED = 64, 512

Report = Callable[[str, Mapping[str, Any]], None]


class _Field:
    """One row-wise state field as restored."""

    def __init__(self, table: TrackedTable, name: str, tensor: Tensor) -> None:
        self.name = name
        self.shape, self.dtype = tensor.shape, tensor.dtype
        for looked_at in _SAMPLE_SIZES:
            stride = max(1, tensor.shape[0] // looked_at)
            some = tensor[::stride].reshape(len(tensor[::stride]), -1)
            self.usual = some[:, 0].mode().values
            at = (some != self.usual).any(dim=1).nonzero().view(-1)
            if len(at) >= _FEW or stride == 1:
                break
        self.ids = at[:: max(1, len(at) // _REMEMBERED)][:_REMEMBERED] * stride
        self.values = _rows(tensor, self.ids)
        self.weights = _rows(table.param, self.ids).to(tensor.device)

    def was_reset(self, live: Tensor | None, weights: Tensor, clean: Tensor | None) -> bool:
        """Whether the remembered rows among `clean` (bool [R], or None for all) were recreated."""
        if live is None or live.shape != self.shape or live.dtype != self.dtype:
            return True
        chosen = slice(None) if clean is None else clean.to(self.ids.device)[self.ids]
        ids, was = self.ids[chosen], self.values[chosen]
        now = _rows(live, ids)
        if not ids.numel() or torch.equal(was, now):
            return False
        one = now.reshape(-1)[0]
        if bool((now == one).all()):
            return bool(one == self.usual) or not bool((was == was.reshape(-1)[0]).all())
        own = _rows(weights, ids).to(now.device)
        kept = (own == self.weights[chosen]).all(dim=1)
        own = own.to(now.dtype)
        return now.shape == own.shape and bool(kept.any()) and torch.equal(now[kept], own[kept])


class _WatchedTable:
    """State of one table in an optimizer that has not stepped yet."""

    def __init__(self, table: TrackedTable, owner: Any, fields: list[_Field]) -> None:
        self.table = table
        self.owner = owner
        self.fields = fields
        self.grad: Tensor | None = None


class FirstStep:
    """Watches restored tables until the optimizer that owns their state has stepped."""

    def __init__(self, tables: Iterable[TrackedTable], report: Report) -> None:
        self._report = report
        self._left: list[_WatchedTable] = []
        for table in tables:
            by_owner: dict[int, list[_Field]] = {}
            for name, tensor in table.state_tensors().items():
                nth = int(name.partition("@")[2] or 0)
                by_owner.setdefault(nth, []).append(_Field(table, name, tensor))
            for nth, fields in by_owner.items():
                if any(field.ids.numel() for field in fields):
                    self._left.append(_WatchedTable(table, table.views[nth].target, fields))

    @property
    def is_finished(self) -> bool:
        return not self._left

    def before(self, optimizer: Any) -> None:
        """Keep the gradients before `optimizer` steps, since a hook may drop them."""
        for watched in self._left:
            if watched.owner is optimizer:
                watched.grad = watched.table.param.grad

    def after(self, optimizer: Any) -> None:
        for watched in list(self._left):
            if watched.owner is not optimizer:
                continue
            grad = watched.grad if watched.grad is not None else watched.table.param.grad
            found = self._check(watched, grad)
            if found or grad is not None:
                self._left.remove(watched)

    def finish(self) -> None:
        """Check the remaining tables (owned by wrappers without hooks) at a snapshot, without their gradients."""
        for watched in self._left:
            self._check(watched, None)
        self._left.clear()

    def _check(self, watched: _WatchedTable, grad: Tensor | None) -> bool:
        try:
            return self._compare(watched, None if grad is None else _clean(grad))
        except Exception as error:  # noqa: BLE001 - inside the user's step: a check must not interrupt training
            _log.warning("the state of table %s could not be compared: %s", watched.table.fqn, error)
            return True

    def _compare(self, watched: _WatchedTable, clean: Tensor | None) -> bool:
        table = watched.table
        live = table.state_tensors()
        weights = table.param.detach()
        thrown = [f for f in watched.fields if f.was_reset(live.get(f.name), weights, clean)]
        gone = [f for f in thrown if f.name not in live]
        if len(thrown) < sum(bool(f.ids.numel()) for f in watched.fields):
            thrown = gone  # the last gradient (Adam with beta1 = 0, Rprop) is legitimately zero there
        for field in thrown:
            _log.warning(
                "optimizer state %s of table %s was restored and is gone after the first step: the optimizer "
                "initialises it at its first step, and training continues from new state. Keep the flag that it is "
                "initialised as a plain attribute of the optimizer or in its state: both are restored",
                field.name,
                table.fqn,
            )
            self._report("optimizer_state_reset", {"table": table.fqn, "field": field.name})
        if thrown:
            table.rewritten()
        return bool(thrown)


def _rows(tensor: Tensor, ids: Tensor) -> Tensor:
    rows = tensor.detach()[ids.to(tensor.device)]
    return rows.unsqueeze(1) if rows.dim() == 1 else rows


def _clean(grad: Tensor) -> Tensor:
    """Return which rows have no gradient: bool [R]."""
    if not grad.is_sparse:
        return (grad == 0).all(dim=1)
    clean = torch.ones(grad.shape[0], dtype=torch.bool, device=grad.device)
    clean[grad._indices()[0]] = False  # noqa: SLF001 - indices() rejects uncoalesced gradients
    return clean
