"""Versions and addresses of all tensors of an optimizer's tables, to detect writes outside of its steps.

A model has tens or hundreds of tables, for each of which a step of a small batch takes microseconds. Almost always
nothing has changed, which a few passes over flat lists establish in C. Any difference is handled per table
(`TrackedTable.before_step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from deltashard.tracking.tracked_table import TrackedTable

_version, _address = attrgetter("_version"), Tensor.data_ptr
_values, _signed = methodcaller("values"), attrgetter("signed")
_trained, _max_norm = attrgetter("requires_grad"), attrgetter("max_norm")


class Signature:
    """Versions and addresses of some tensors, which change with in-place writes and reallocation."""

    __slots__ = ("addresses", "versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Record the current values of `tensors`, in order."""
        self.versions: list[int] = [*map(_version, tensors)]
        """Torch's counters of in-place writes."""
        self.addresses: list[int] = [*map(_address, tensors)]


Signed = tuple[Signature, slice]
"""A signature and the slice of it that belongs to one table."""


class TensorVersionSet:
    """The tables of an optimizer as they were right after its last step; invalid once `unchanged` returned False."""

    __slots__ = (
        "_entries", "_keys", "_lookups", "_params", "_places", "_signature", "_signed", "_state", "_states", "_tables",
        "_tensors", "_types",
    )  # fmt: skip

    def __init__(self, tables: Sequence[TrackedTable]) -> None:
        """Record `tables`, which must be tracked by gradients and just signed. They share one signature from now on."""
        self._tables = tables
        self._params = [table.param for table in tables]
        self._lookups = [lookup for table in tables for lookup in table.lookups]
        targets = {id(view.target): view.target for table in tables for view in table.views}
        self._states = [(target, target.state, [*target.state.values()]) for target in targets.values()]
        self._entries = [entry for table in tables for entry in table.entries()]
        self._keys = [*chain.from_iterable(self._entries)]
        values = [*chain.from_iterable(map(_values, self._entries))]
        self._types = [*map(type, values)]
        self._places = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
        self._state = [values[at] for at in self._places]
        self._tensors: list[Tensor] = []
        parts = []
        for table in tables:
            start = len(self._tensors)
            self._tensors += table.signable()
            parts.append(slice(start, len(self._tensors)))
        self._signature = Signature(self._tensors)
        self._signed: list[Signed] = [(self._signature, part) for part in parts]
        for table, signed in zip(tables, self._signed, strict=True):
            table.signed = signed

    def unchanged(self) -> bool:
        """Before a step, return whether only the last step wrote the tables.

        Also checks that all of them are trained, without max_norm.
        """
        return (
            all(map(is_, map(_signed, self._tables), self._signed))
            and self._in_place()
            and [*map(_version, self._tensors)] == self._signature.versions
            and all(map(_trained, self._params))
            and not any(norm is not None for norm in map(_max_norm, self._lookups))
        )

    def stepped(self) -> bool:
        """After the step, accept its writes; return False if state was added or removed, or a table was signed again.

        Whitelisted optimizers write in place. Replaced state would count as written from outside in the next
        `unchanged`, which marks too many rows, never too few.
        """
        for target, _, entries in self._states:
            if len(target.state) != len(entries):
                return False
        if sum(map(len, self._entries)) != len(self._types) or not all(
            map(is_, map(_signed, self._tables), self._signed)
        ):
            return False
        self._signature.versions = [*map(_version, self._tensors)]
        return True

    def _in_place(self) -> bool:
        for target, state, entries in self._states:
            if (
                target.state is not state
                or len(state) != len(entries)
                or not all(map(is_, state.values(), entries))
            ):
                return False
        if self._entries:
            if [*chain.from_iterable(self._entries)] != self._keys:
                return False
            values: list[Any] = [*chain.from_iterable(map(_values, self._entries))]
            if [*map(type, values)] != self._types:
                return False
            if not all(map(is_, map(values.__getitem__, self._places), self._state)):
                return False
        return [*map(_address, self._tensors)] == self._signature.addresses
