"""Versions and addresses of all tensors of an optimizer's tables: whether anything but its steps wrote them.

A model has tens or hundreds of tables, and a step of a small batch takes microseconds for each. Nearly always all is as
it was, and that is told by a few passes over flat lists that run in C. Whatever differs, and whatever cannot be told,
is looked at table by table (`TrackedTable.before_step`), which knows what to do about it.
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
    """What in-place writes and other memory leave behind in some tensors."""

    __slots__ = ("addresses", "versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Of them, in order, now."""
        self.versions: list[int] = [*map(_version, tensors)]
        """Torch's own counts of in-place writes."""
        self.addresses: list[int] = [*map(_address, tensors)]


Signed = tuple[Signature, slice]
"""The part of a signature that one table has."""


class TensorVersionSet:
    """Knows the tables of an optimizer as they were right after its last step; of no use once `unchanged` said no."""

    __slots__ = (
        "_entries", "_keys", "_lookups", "_params", "_places", "_signature", "_signed", "_state", "_states", "_tables",
        "_tensors", "_types",
    )  # fmt: skip

    def __init__(self, tables: Sequence[TrackedTable]) -> None:
        """Take `tables` as they are: tracked by gradients, and just signed. From now on they are signed together."""
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
        """Before a step: whether all of that holds still, so that nothing but the last step wrote them.

        Also whether all of them are trained, without max_norm.
        """
        return (
            all(map(is_, map(_signed, self._tables), self._signed))
            and self._in_place()
            and [*map(_version, self._tensors)] == self._signature.versions
            and all(map(_trained, self._params))
            and not any(norm is not None for norm in map(_max_norm, self._lookups))
        )

    def stepped(self) -> bool:
        """After the step: take what it wrote as seen; False: state came or went, or a table was signed anew.

        Optimizers of the whitelist write in place. State that one of them replaced would be taken for replaced from
        outside by the next `unchanged`, which marks too much, never too little.
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
        """Whether they are the same tensors, in the same memory."""
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
