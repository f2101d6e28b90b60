"""Optimizer data outside `state`: plain attributes, and extra entries of a custom `state_dict()`.

Many custom optimizers hold a flag or a counter in a plain attribute (`initialized`, `count`). If it is not restored,
they recreate their state at the first step. Therefore every attribute that changed since the Checkpointer was built is
saved and restored. An unchanged attribute is left to the program, which may set another value on purpose. Entries that
a class adds to its own `state_dict()` are always saved, and restored through its own `load_state_dict()`.

A parameter, or a tensor that is part of `state`, is stored by name wherever it appears, so it is the same tensor again
after the restore. Values that the tree codec cannot encode (objects, functions, modules) are left unchanged and listed
in `unsaved`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from deltashard_checkpoint.errors import UserError
from torch import Tensor, nn

from deltashard.optimizer.whitelist import wrapped_optimizers
from deltashard.state.rng import apply_own, capture_own, is_generator
from deltashard.state.value import encode_value, tensors_in

_log = logging.getLogger("deltashard.tracking")

LARGE_BYTES = 64 << 20
"""Larger attributes cause one warning."""
_COMPARED_BYTES = 1 << 20
"""Larger values always count as changed, because comparing them would cost as much as saving them."""
_TORCH_ATTRIBUTES = {"defaults", "state", "param_groups", "step", "grad_scale", "found_inf"}
"""Attributes of torch's base class, schedulers and GradScaler; see also `_TORCH_PREFIXES`."""
_TORCH_PREFIXES = (
    "_optimizer_", "_zero_grad_profile_name", "_warned_capturable", "_step_supports_amp", "_need_device_dtype",
    "_opt_called", "_step_count", "_hook_for_profile", "_patch_step",
)  # fmt: skip
_PARAM, _STATE = "deltashard.param", "deltashard.state"
_KEYED, _GENERATOR = "deltashard.keyed", "deltashard.generator"


class _Names:
    """Replaces tensors that are stored by name with their names, and vice versa."""

    def __init__(self, params: Mapping[str, Tensor], state: Mapping[Any, Any]) -> None:
        self._params = params
        self._state = state
        self._known: dict[int, dict[str, Any]] = {id(p): {_PARAM: n} for n, p in params.items()}
        for name, param in params.items():
            for key, value in (state.get(param) or {}).items():
                if isinstance(value, Tensor):
                    self._known[id(value)] = {_STATE: [name, key]}

    def pack(self, value: Any) -> Any:
        """Return `value` with names for parameters and state; raises `UserError` for a parameter in no group."""
        known = self._known.get(id(value))
        if known is not None:
            return known
        if isinstance(value, nn.Parameter):
            raise UserError("a parameter that is in no group", where="attribute")
        if is_generator(value):
            return {_GENERATOR: capture_own(value)}
        if type(value) in (list, tuple):
            return type(value)(self.pack(v) for v in value)
        if type(value) in (dict, defaultdict, OrderedDict):
            if any(isinstance(key, Tensor) for key in value):
                return {_KEYED: [[self.pack(k), self.pack(v)] for k, v in value.items()]}
            packed = value.copy()
            packed.update((k, self.pack(v)) for k, v in value.items())
            return packed
        return value

    def unpack(self, live: Any, saved: Any) -> Any:
        """Return the restored value of an attribute; tensors that fit are written in place, so sharing is kept."""
        if isinstance(saved, dict) and len(saved) == 1:
            ((marker, held),) = saved.items()
            if marker == _PARAM:
                return self._params[held]
            if marker == _STATE:
                return self._state[self._params[held[0]]][held[1]]
            if marker == _KEYED:
                return self._unpack_keyed(live, held)
            if marker == _GENERATOR:
                apply_own(live, held)
                return live
        if isinstance(saved, Tensor):
            if isinstance(live, Tensor) and live.shape == saved.shape and live.dtype == saved.dtype:
                with torch.no_grad():
                    live.copy_(saved)
                return live
            near = saved if saved.dim() == 0 else next(iter(self._params.values()), saved)
            # A tensor created at the first step is on the device of the parameters.
            device = live.device if isinstance(live, Tensor) else near.device
            return saved.detach().to(device, copy=True)
        if type(saved) in (list, tuple):
            old = live if isinstance(live, list | tuple) and len(live) == len(saved) else [None] * len(saved)
            return type(saved)(self.unpack(o, v) for o, v in zip(old, saved, strict=True))
        if isinstance(saved, dict):
            inner = live if isinstance(live, Mapping) else {}
            found = saved.copy()
            found.update((k, self.unpack(inner.get(k), v)) for k, v in saved.items())
            return found
        return saved

    def _unpack_keyed(self, live: Any, pairs: list[Any]) -> Any:
        found = {}
        for key, value in pairs:
            at = self.unpack(None, key)
            found[at] = self.unpack(live.get(at) if isinstance(live, Mapping) else None, value)
        if isinstance(live, MutableMapping):  # a defaultdict keeps its factory
            live.clear()
            live.update(found)
            return live
        return found


class Attributes:
    """Attributes of one optimizer or wrapper, compared with their values at construction of this object."""

    def __init__(self, target: Any, params: Mapping[str, Tensor], state: Mapping[Any, Any]) -> None:
        self.target = target
        self.unsaved: list[str] = []
        self._warned = False
        self._initial = {name: mark for name, _, mark in self._plain(_Names(params, state))}

    def capture(self, params: Mapping[str, Tensor], state: Mapping[Any, Any]) -> dict[str, Any]:
        """Return `{}`, or `plain` {name: [value], or [] if deleted} and `entries` of the custom `state_dict()`."""
        names = _Names(params, state)
        now = list(self._plain(names))
        plain = {n: [value] for n, value, mark in now if mark is None or mark != self._initial.get(n)}
        plain |= {n: [] for n in self._initial.keys() - {n for n, _, _ in now} if n not in vars(self.target)}
        entries = self._entries(names)
        return {key: value for key, value in (("plain", plain), ("entries", entries)) if value}

    def restore(
        self, saved: Mapping[str, Any], params: Mapping[str, Tensor], state: Mapping[Any, Any]
    ) -> list[str]:
        """Restore what `capture` returned, after state and groups; returns notes."""
        notes = []
        names = _Names(params, state)
        kind = type(self.target).__name__
        if saved.get("entries"):
            try:
                with _preserve_objects(self.target):
                    whole = dict(self.target.state_dict())
                    for key, value in saved["entries"].items():
                        whole[key] = names.unpack(None, value)
                    self.target.load_state_dict(whole)
            except Exception as error:  # noqa: BLE001 - user code: a note reports what it rejects
                notes.append(
                    f"{kind}.load_state_dict rejected its own entries {list(saved['entries'])}: {error}"
                )
        for name, value in saved.get("plain", {}).items():
            try:
                if value:
                    setattr(self.target, name, names.unpack(getattr(self.target, name, None), value[0]))
                elif hasattr(self.target, name):
                    delattr(self.target, name)
            except (AttributeError, KeyError, TypeError) as error:
                notes.append(f"{kind}.{name} was saved and cannot be set: {type(error).__name__}: {error}")
        return notes

    def _plain(self, names: _Names) -> Iterator[tuple[str, Any, bytes | None]]:
        """Yield (name, packed value, fingerprint or None if too large to compare) of storable attributes."""
        unsaved = []
        for name, value in vars(self.target).items() if hasattr(self.target, "__dict__") else ():
            if (
                name in _TORCH_ATTRIBUTES
                or name.startswith(_TORCH_PREFIXES)
                or isinstance(value, torch.optim.Optimizer)
            ):
                continue
            try:
                packed = names.pack(value)
                tree = encode_value(packed)
            except (UserError, RecursionError):
                if not callable(value):
                    unsaved.append(name)
                continue
            self._warn_large(name, tree.total_bytes)
            small = tree.total_bytes <= _COMPARED_BYTES
            yield name, packed, hashlib.blake2b(tree.to_bytes()).digest() if small else None
        self.unsaved = unsaved

    def _entries(self, names: _Names) -> dict[Any, Any]:
        own = getattr(type(self.target), "state_dict", None)
        hooks = getattr(self.target, "_optimizer_state_dict_post_hooks", None)
        if own is None or (own is torch.optim.Optimizer.state_dict and not hooks):
            return {}
        held = self.target.state_dict()
        found = {}
        for key, value in held.items() if isinstance(held, Mapping) else ():
            if key in ("state", "param_groups") or _is_redundant(value, self.target):
                continue
            packed = names.pack(value)
            try:
                self._warn_large(str(key), encode_value(packed).total_bytes)
            except UserError as error:
                raise UserError(
                    f"the entry {key!r} of {type(self.target).__name__}.state_dict() cannot be stored: {error.what}",
                    where="optimizer",
                    remedy=error.remedy,
                ) from error
            found[key] = packed
        return found

    def _warn_large(self, name: str, size: int) -> None:
        if size > LARGE_BYTES and not self._warned:
            self._warned = True
            _log.warning(
                "%s.%s holds %d MiB outside the optimizer's state: it is saved whole in every snapshot. "
                "Move it to state[param] to save it with the rows",
                type(self.target).__name__,
                name,
                size >> 20,
            )


def _is_redundant(entry: Any, target: Any) -> bool:
    """Whether an entry of a wrapper's state_dict only repeats saved state of the wrapper or of what it wraps."""
    if not isinstance(entry, Mapping | list | tuple):
        return False
    saved = set()
    for owner in (target, *wrapped_optimizers(target)):
        saved |= {t.data_ptr() for t in tensors_in(dict(getattr(owner, "state", {})))}
        groups = getattr(owner, "param_groups", ())
        saved |= {t.data_ptr() for group in groups for t in tensors_in(group)}
    held = [t for t in tensors_in(entry) if t.numel()]
    if held:
        return all(t.data_ptr() in saved for t in held)
    # An entry without tensors may still be an inner optimizer's whole state_dict.
    return isinstance(entry, Mapping) and {"state", "param_groups"} <= entry.keys()


@contextmanager
def _preserve_objects(target: Any) -> Iterator[None]:
    """Keep the state and group objects of `target` and of what it wraps: torch would cast and rebind them."""
    held = []
    for owner in dict.fromkeys((target, *wrapped_optimizers(target))):
        state, groups = getattr(owner, "state", None), getattr(owner, "param_groups", None)
        entries = dict(state) if isinstance(state, MutableMapping) else None
        inner = {k: dict(v) for k, v in (entries or {}).items() if isinstance(v, MutableMapping)}
        held.append((owner, state, entries, inner, groups, [dict(g) for g in groups or ()]))
    try:
        yield
    finally:
        for owner, state, entries, inner, groups, copies in held:
            if state is not None and entries is not None:
                for key, members in inner.items():
                    entries[key].clear()
                    entries[key].update(members)
                state.clear()
                state.update(entries)
                if owner.state is not state:
                    owner.state = state
            if groups is not None:
                for group, copied in zip(groups, copies, strict=True):
                    group.clear()
                    group.update(copied)
                if owner.param_groups is not groups:
                    owner.param_groups = groups
