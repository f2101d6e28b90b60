"""Modules that define their own state: `get_extra_state`, an own `state_dict`, hooks on it.

Parameters and persistent buffers are saved and restored in place, under their attribute paths, independent of their
names in `state_dict()`. Additional entries of a module's `state_dict()` (extra state, a counter, a private table) are
state as well. Therefore `state_dict()` of the topmost modules with such a contract is called at every snapshot, and all
entries except live tensors that are saved anyway go into a blob, `state/module:<path>`. At a restore
`load_state_dict()` of these modules gets a complete `state_dict`, made of the live tensors and the stored entries, so
all side effects of loading happen. Their tensors are then written again, since loading may have converted them.

A frozen tensor that the contract leaves out of its `state_dict` is left out of the checkpoint, too. A trained one is
saved all the same, since training must not lose it.

An older version treats the blob as an entry of `state=` that was not given, and rejects the checkpoint.
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

MAX_EXTRA_BYTES = 64 << 20
"""Limit of a module's `state_dict()` in addition to live tensors: all of it is written at every save."""

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
    """One module with its own `state_dict`, as a source of state."""

    def __init__(self, path: str, module: nn.Module, why: str, inventory: Callable[[], Inventory]) -> None:
        self.path = path
        self.module = module
        self.why = why
        """The method or hook that makes the module a contract."""
        self._prefix = f"{path}." if path else ""
        self._inventory = inventory
        held = self._module_state()
        keys = {_storage_key(value) for value in held.values()}
        self.left_out = frozenset(
            fqn
            for fqn, t in inventory().dense.items()
            if fqn.startswith(self._prefix)
            and not t.requires_grad
            and _storage_key(t) not in keys
            # A copy under the tensor's name (half(), clone()) counts as included; the tensor's own bits are saved.
            and fqn.removeprefix(self._prefix) not in held
        )
        """Frozen tensors that the module excludes."""
        self.source = ValueSource(name=f"{MODULE_PREFIX}{path}", get=self.extras, set=self.load)

    @property
    def name(self) -> str:
        return f"module {self.path or 'the model'} ({type(self.module).__name__}, {self.why})"

    def extras(self) -> dict[str, Any]:
        """Entries of the module's `state_dict()` except live tensors, by the module's keys."""
        living = self._live_tensors()
        return {
            key: value for key, value in self._module_state().items() if _storage_key(value) not in living
        }

    def load(self, held: Mapping[str, Any]) -> None:
        """Pass live tensors and stored entries to the module's `load_state_dict`.

        Raises:
            CheckpointMismatch: the module rejects them, or loading changes rows of a table.
        """
        own_state, living = self._module_state(), self._live_tensors()
        for key, value in own_state.items():
            own_state[key] = living.get(_storage_key(value), value)
        own_state.update(held)
        before = self._probe()
        try:
            with torch.no_grad():
                self.module.load_state_dict(own_state)
        except Exception as error:
            if held:
                raise CheckpointMismatch(
                    f"its load_state_dict rejects the output of its state_dict: {error}",
                    where=self.name,
                    remedy="both must name the same entries",
                ) from error
            # The module only renames for other readers: its tensors are restored in place, and nothing else was stored.
            log.debug("%s does not load its own state_dict", self.name, exc_info=error)
        if any(not torch.equal(a, b) for a, b in zip(before, self._probe(), strict=True)):
            raise CheckpointMismatch(
                "its load_state_dict changes rows of a table, which would then differ from the saved rows",
                where=self.name,
                remedy="let state_dict() contain the table's parameter itself",
            )

    def refuse(self) -> None:
        """Raises `StateError` for state that cannot be saved or is too large for every save."""
        extras = self.extras()
        keys = {_storage_key(value) for value in self._module_state().values()}
        copied = {found.fqn: found.param for found in self._tables() if _storage_key(found.param) not in keys}
        shapes = {tuple(param.shape) for param in copied.values()}
        remedy = "let it return the parameters themselves, as torch's does, plus only small additional values"
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
                f"its state_dict() holds {size >> 20} MiB that are not its parameters or buffers, "
                "which would be written at every save",
                where=self.name,
                remedy=remedy,
            )
        check_value(extras, where=self.name)

    def _module_state(self) -> dict[str, Any]:
        own_state = self.module.state_dict()
        if not isinstance(own_state, dict):
            raise StateError(
                f"its state_dict() returns a {type(own_state).__name__}",
                where=self.name,
                remedy="return a dict that its load_state_dict() accepts",
            )
        return own_state

    def _live_tensors(self) -> dict[object, Tensor]:
        """Tensors of the module that are saved in place, by storage key."""
        living: dict[object, Tensor] = {_storage_key(found.param): found.param for found in self._tables()}
        for fqn, tensor in self._inventory().dense.items():
            if fqn.startswith(self._prefix) and fqn not in self.left_out:
                living[_storage_key(tensor)] = tensor
        return living

    def _tables(self) -> list[FoundTable]:
        return [t for fqn, t in self._inventory().tables.items() if fqn.startswith(self._prefix)]

    def _probe(self) -> list[Tensor]:
        """Hashes of up to 2,048 evenly spaced rows of each table."""
        found = []
        for table in self._tables():
            rows = table.param.shape[0]
            ids = torch.arange(0, rows, max(1, rows // _PROBED_ROWS), device=table.param.device)
            found.append(row_hash.row_hashes([table.param.detach()], 0, rows=ids))
        return found


def contracts_of(model: nn.Module, inventory: Callable[[], Inventory]) -> list[Contract]:
    """The topmost modules of `model` with an own contract, except modules that shard their tables.

    Raises:
        StateError: a module's state cannot be saved or is too large, or its `state_dict()` raised an error.
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
                f"it has its own {why.removeprefix('its own ')} and contains sharded tables",
                where=f"module {path or 'the model'} ({type(module).__name__})",
                remedy="define state_dict() only on its submodules without sharded tables",
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
            "%s leaves %s out of its state_dict: not saved, and keeps its initial value after a restore",
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
    """Raises `StateError` when an entry of `state=` contains the tracked model again."""
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
    """Contracts that a checkpoint of an older version does not contain: these give notes instead of faults."""
    if "modules" in meta:
        return []
    return [name for name in names if name.startswith(MODULE_PREFIX) and name not in held]


def _contract_reason(module: nn.Module) -> str | None:
    for method in _METHODS:
        if method in module.__dict__:
            return f"its own {method}"
        definer = next(each for each in type(module).__mro__ if method in each.__dict__)
        # Overrides in torch's own layers add only tensors or handle old versions.
        if definer is not nn.Module and not definer.__module__.startswith("torch.nn."):
            return f"its own {method}"
    return next((words for hooks, words in _HOOKS.items() if getattr(module, hooks, None)), None)


def _storage_key(value: object) -> object:
    """A key that is equal for a tensor and its counterpart in `state_dict()`, and unique for other values."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return id(value)
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
