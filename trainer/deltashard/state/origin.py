"""Shapes and dtypes of a model's dense tensors at construction, and their changes since.

A buffer can grow while training (an observer's ranges, a buffer that was None). A new process builds the model with the
small buffer, while the checkpoint has the large one, and the restore has to recognize growth. Therefore a snapshot
records, in the `meta` blob, the shape of each changed buffer at construction.

A changed parameter or dtype (`model.half()` after the Checkpointer was built) is saved as it is now. A program that
builds the model as before cannot restore such a checkpoint, so the first snapshot that contains it logs a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltashard.state.discovery import canonical_prefixes, dtype_name

log = logging.getLogger("deltashard")

Shape = tuple[int, ...]


class Origin:
    """Shapes and dtypes of dense tensors and tables at construction."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._initial = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        self._reported: set[str] = set()

    def grown(self, tensors: Mapping[str, Tensor]) -> dict[str, list[int] | None]:
        """Buffers whose shape changed since construction, with the original shape; None: there was no tensor."""
        found: dict[str, list[int] | None] = {}
        for name, tensor in tensors.items():
            was = self._initial.get(name)
            if isinstance(tensor, nn.Parameter):
                continue
            if was is None:
                found[name] = None
            elif was[0] != tuple(tensor.shape):
                found[name] = list(was[0])
        return found

    def warn_changes(self, tensors: Mapping[str, Tensor]) -> None:
        """Warn, once per tensor, of changes that a newly built program will not have."""
        changes = {}
        for name, (shape, dtype) in self._initial.items():
            now = tensors.get(name)
            if now is None:
                changes[name] = "was removed"
            elif now.dtype != dtype:
                changes[name] = f"changed from {dtype_name(dtype)} to {dtype_name(now.dtype)}"
            elif isinstance(now, nn.Parameter) and tuple(now.shape) != shape:
                changes[name] = f"changed from {shape} to {tuple(now.shape)}"
        changes |= {
            name: "is new"
            for name, tensor in tensors.items()
            if name not in self._initial and isinstance(tensor, nn.Parameter)
        }
        unreported = {name: change for name, change in changes.items() if name not in self._reported}
        if not unreported:
            return
        self._reported |= unreported.keys()
        log.warning(
            "the model changed after the Checkpointer was built: %s%s. It is saved as it is now; to restore it, make "
            "the same change before building the Checkpointer",
            "; ".join(f"{name} {change}" for name, change in list(unreported.items())[:4]),
            f" and {len(unreported) - 4} more" if len(unreported) > 4 else "",
        )


def may_grow(
    name: str, value: Tensor, live: Tensor | None, grown: Mapping[str, Any], model: nn.Module
) -> bool:
    """Whether the stored `value` is a grown version of buffer `name` of the model as built."""
    if name not in grown:
        return False
    was = grown[name]
    if live is None:
        return was is None and slot_of(model, name) is not None
    return (
        was is not None
        and not isinstance(live, nn.Parameter)
        and tuple(was) == tuple(live.shape)
        and value.dtype == live.dtype
    )


def grow(name: str, value: Tensor, live: Tensor | None, model: nn.Module) -> None:
    """Give buffer `name` the shape and the values of `value`, keeping the identity of an existing tensor."""
    if live is not None:
        live.data = value.detach().to(live.device, copy=True)
    elif (slot := slot_of(model, name)) is not None:
        module, leaf = slot
        near = next(
            (t.device for t in (*module.parameters(), *module.buffers(), *model.parameters())),
            torch.device("cpu"),
        )
        module._buffers[leaf] = value.detach().to(near, copy=True)  # noqa: SLF001 - setattr would run descriptors


def slot_of(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module and attribute of a buffer that is currently None; None if there is no such attribute."""
    path, _, leaf = name.rpartition(".")
    for prefix, module in canonical_prefixes(model):
        if prefix == path and leaf in module._buffers and module._buffers[leaf] is None:  # noqa: SLF001
            return module, leaf
    return None
