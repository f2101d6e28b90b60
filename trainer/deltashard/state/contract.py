"""Modules that say themselves what their state is: `get_extra_state`, their own `state_dict`, hooks on it.

Parameters and persistent buffers are saved and restored in place, under their attribute paths, whatever a module calls
them in its `state_dict()`. What a module puts there beside them (extra state, a counter, a table of its own) is state
as well. So the topmost modules with such a contract are asked for their `state_dict()` at every cut: what in it is no
living tensor that is saved anyway goes into a blob, `state/module:<path>`. At a restore they get a whole `state_dict`
back by their `load_state_dict()`, the living tensors and what was stored, so that whatever they do on loading happens;
their tensors are written once more afterwards, for the bits of a conversion would not be the bits that were saved.

A frozen tensor that the contract leaves out of its `state_dict` is left out of the checkpoint, too. A trained one is
saved all the same: the contract cannot mean that training loses it.

Under an older build the blob's name is that of an entry of `state=` which was not given: it refuses, as it must.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltashard.errors import CheckpointMismatch, StateError
from deltashard.state import row_hash
from deltashard.state.discovery import FoundTable, Inventory, canonical_prefixes, is_wrapper
from deltashard.state.value import ValueSource, check_value, tensors_in

log = logging.getLogger("deltashard")

MODULE_PREFIX = "module:"
"""What the names of these sources begin with."""

MAX_EXTRA_BYTES = 64 << 20
"""So much beside its living tensors may be in a module's state_dict: all of it is written at every save."""

_METHODS = (
    "get_extra_state",
    "_save_to_state_dict",
    "state_dict",
    "_load_from_state_dict",
    "load_state_dict",
)
_HOOKS = {
    "_state_dict_hooks": "a state_dict hook",
    "_state_dict_pre_hooks": "a state_dict pre-hook",
    "_load_state_dict_pre_hooks": "a load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "a load_state_dict post-hook",
}
_PROBED_ROWS = 2048


class Contract:
    """One module with a state_dict of its own making, and what it says."""

    def __init__(self, path: str, module: nn.Module, why: str, inventory: Callable[[], Inventory]) -> None:
        self.path = path
        self.module = module
        self.why = why
        """What makes it one: the method or hook."""
        self._prefix = f"{path}." if path else ""
        self._inventory = inventory
        held = self._module_state()
        said = {_storage_key(value) for value in held.values()}
        self.left_out = frozenset(
            fqn
            for fqn, t in inventory().dense.items()
            if fqn.startswith(self._prefix)
            and not t.requires_grad
            and _storage_key(t) not in said
            # A copy under its own name (half(), clone()) is said: the bits are those of the tensor.
            and fqn.removeprefix(self._prefix) not in held
        )
        """Frozen tensors that the module does not want saved."""
        self.source = ValueSource(name=f"{MODULE_PREFIX}{path}", get=self.extras, set=self.load)

    @property
    def name(self) -> str:
        return f"module {self.path or 'the model'} ({type(self.module).__name__}, {self.why})"

    def extras(self) -> dict[str, Any]:
        """What the module says beside its living tensors, by its own key."""
        living = self._live_tensors()
        return {
            key: value for key, value in self._module_state().items() if _storage_key(value) not in living
        }

    def load(self, held: Mapping[str, Any]) -> None:
        """Give the module its living tensors and what was stored, by its own `load_state_dict`.

        Raises:
            CheckpointMismatch: it does not take it, or loading changes rows of a table.
        """
        said, living = self._module_state(), self._live_tensors()
        for key, value in said.items():
            said[key] = living.get(_storage_key(value), value)
        said.update(held)
        before = self._probe()
        try:
            with torch.no_grad():
                self.module.load_state_dict(said)
        except Exception as error:
            if held:
                raise CheckpointMismatch(
                    f"its load_state_dict refuses what its state_dict said: {error}",
                    where=self.name,
                    remedy="both must name the same entries",
                ) from error
            # One that only renames for others to read: its tensors are restored in place, nothing else was stored.
            log.debug("%s does not load its own state_dict", self.name, exc_info=error)
        if any(not torch.equal(a, b) for a, b in zip(before, self._probe(), strict=True)):
            raise CheckpointMismatch(
                "its load_state_dict changes rows of a table: they would not be those that were saved",
                where=self.name,
                remedy="let state_dict() hold the table's parameter itself",
            )

    def refuse(self) -> None:
        """Raises `StateError` for what cannot be saved, or costs too much at every save."""
        extras = self.extras()
        said = {_storage_key(value) for value in self._module_state().values()}
        copied = {found.fqn: found.param for found in self._tables() if _storage_key(found.param) not in said}
        shapes = {tuple(param.shape) for param in copied.values()}
        remedy = (
            "let it return the parameters themselves, as torch's does, and only what is small beside them"
        )
        held = list(tensors_in(extras))
        if any(tuple(t.shape) in shapes for t in held):
            raise StateError(
                f"its state_dict() holds a copy of a table ({', '.join(copied)}), "
                "which would be written whole at every save",
                where=self.name,
                remedy=remedy,
            )
        if (size := sum(t.numel() * t.element_size() for t in held)) > MAX_EXTRA_BYTES:
            raise StateError(
                f"its state_dict() holds {size >> 20} MiB that are no parameters or buffers of it, "
                "which would be written at every save",
                where=self.name,
                remedy=remedy,
            )
        check_value(extras, where=self.name)

    def _module_state(self) -> dict[str, Any]:
        said = self.module.state_dict()
        if not isinstance(said, dict):
            raise StateError(
                f"its state_dict() returns a {type(said).__name__}",
                where=self.name,
                remedy="it must return a dict, which its load_state_dict() takes",
            )
        return said

    def _live_tensors(self) -> dict[object, Tensor]:
        """Tensors of the module that are saved in place, by where they lie."""
        living: dict[object, Tensor] = {_storage_key(found.param): found.param for found in self._tables()}
        for fqn, tensor in self._inventory().dense.items():
            if fqn.startswith(self._prefix) and fqn not in self.left_out:
                living[_storage_key(tensor)] = tensor
        return living

    def _tables(self) -> list[FoundTable]:
        return [t for fqn, t in self._inventory().tables.items() if fqn.startswith(self._prefix)]

    def _probe(self) -> list[Tensor]:
        """Hashes of up to 2,048 rows of each table, evenly spread."""
        found = []
        for table in self._tables():
            rows = table.param.shape[0]
            ids = torch.arange(0, rows, max(1, rows // _PROBED_ROWS), device=table.param.device)
            found.append(row_hash.row_hashes([table.param.detach()], 0, rows=ids))
        return found


def contracts_of(model: nn.Module, inventory: Callable[[], Inventory]) -> list[Contract]:
    """The topmost modules of `model` with a contract of their own; those that shard their tables are no contracts.

    Raises:
        StateError: one holds what cannot be saved or is too much, or raises.
    """
    found: list[Contract] = []
    sharded = inventory().sharded
    inside = {id(each) for module in sharded for each in module.modules()}
    for path, module in canonical_prefixes(model):
        if id(module) in inside or is_wrapper(module):
            continue
        why = _contract_reason(module)
        if why is None:
            continue
        if any(each is one for each in module.modules() for one in sharded):
            raise StateError(
                f"it has {why.removeprefix('its own ')} of its own making, and sharded tables inside",
                where=f"module {path or 'the model'} ({type(module).__name__})",
                remedy="leave state_dict() to the parts of it that hold no sharded tables",
            )
        inside.update(id(each) for each in module.modules())
        found.append(_make_contract(path, module, why, inventory))
    return found


def _make_contract(path: str, module: nn.Module, why: str, inventory: Callable[[], Inventory]) -> Contract:
    try:
        contract = Contract(path, module, why, inventory)
        contract.refuse()
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"its state_dict() raised {type(error).__name__}: {error}",
            where=f"module {path or 'the model'} ({type(module).__name__}, {why})",
            remedy="a module's state_dict() must work at any time between two steps",
        ) from error
    if contract.left_out:
        log.info(
            "%s leaves %s out of its state_dict: not saved, and as constructed after a restore",
            contract.name,
            ", ".join(sorted(contract.left_out)[:8]),
        )
    return contract


def tables_in(inventory: Inventory, value: object) -> Iterator[tuple[FoundTable, Tensor]]:
    storages = {found.param.untyped_storage().data_ptr(): found for found in inventory.tables.values()}
    for tensor in tensors_in(value):
        if tensor.layout == torch.strided and tensor.numel():
            found = storages.get(tensor.untyped_storage().data_ptr())
            if found is not None:
                yield found, tensor


def refuse_model(name: str, value: object, inventory: Inventory) -> None:
    """Raises `StateError` when an entry of `state=` holds the tracked model again."""
    remedy = (
        "leave it out of state=: the model is saved already, its tables row by row; "
        "give only what is not in the model (a scheduler, a scaler, averaged weights)"
    )
    for found, tensor in tables_in(inventory, value):
        raise StateError(
            f"holds table {found.fqn} ({tensor.numel() * tensor.element_size():,} bytes), "
            "which would be written whole at every save",
            where=f"state[{name!r}]",
            remedy=remedy,
        )
    dense = {_storage_key(t) for t in inventory.dense.values()}
    size = sum(t.numel() * t.element_size() for t in tensors_in(value) if _storage_key(t) in dense)
    if size > MAX_EXTRA_BYTES >> 2:
        raise StateError(
            f"holds {size >> 20} MiB of the model's own parameters, which would be written twice at every save",
            where=f"state[{name!r}]",
            remedy=remedy,
        )


def missing_contracts(names: Sequence[str], held: Mapping[str, Any], meta: Mapping[str, Any]) -> list[str]:
    """Contracts of which a checkpoint of an older version holds nothing: notes, where others are faults."""
    if "modules" in meta:
        return []
    return [name for name in names if name.startswith(MODULE_PREFIX) and name not in held]


def _contract_reason(module: nn.Module) -> str | None:
    for method in _METHODS:
        if method in module.__dict__:
            return f"its own {method}"
        definer = next(each for each in type(module).__mro__ if method in each.__dict__)
        # Those of torch's layers say nothing beside tensors and only look after old versions of themselves.
        if definer is not nn.Module and not definer.__module__.startswith("torch.nn."):
            return f"its own {method}"
    return next((words for hooks, words in _HOOKS.items() if getattr(module, hooks, None)), None)


def _storage_key(value: object) -> object:
    """The same for a tensor and what `state_dict()` makes of it; something else for everything else."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return id(value)
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
