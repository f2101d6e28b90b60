"""State that TorchRec's managed collisions (`MCHManagedCollisionModule`, unsharded) keep in plain attributes.

Between two evictions such a module collects seen ids in a buffer that is not in its `state_dict()`, and counts
iterations in attributes. A module restored without them would evict at other steps with other counts. This state is
saved as another entry of the checkpoint, `state/collisions:<path>`.

TorchRec is not imported here: a model with such a module has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltashard.errors import CheckpointMismatch
from deltashard.state.discovery import canonical_prefixes
from deltashard.state.value import ValueSource

COLLISIONS_PREFIX = "collisions:"
_COUNTS = (
    "_current_iter",
    "_last_eviction_iter",
    "_current_history_buffer_offset",
    "_input_history_buffer_size",
    "_evicted",
)


def is_managed(module: nn.Module) -> bool:
    modules = sys.modules.get("torchrec.modules.mc_modules")
    return modules is not None and isinstance(module, modules.MCHManagedCollisionModule)


def histories(model: nn.Module) -> list[ValueSource]:
    """One source per distinct module of this kind in `model`."""
    found: dict[int, ValueSource] = {}
    for path, module in canonical_prefixes(model):
        if is_managed(module) and id(module) not in found:
            history = _History(module, path)
            found[id(module)] = ValueSource(
                name=f"{COLLISIONS_PREFIX}{path}", get=history.get, set=history.set
            )
    return list(found.values())


class _History:
    """Reads and writes the history of one module."""

    def __init__(self, module: Any, path: str) -> None:
        self._module = module
        self._path = path

    def get(self) -> dict[str, Any]:
        """Return the counts, the evicted ids that were not fetched yet, and the ids seen since the last eviction."""
        module = self._module
        seen = module._current_history_buffer_offset  # noqa: SLF001 - TorchRec offers no accessor to any of it
        begun = module._input_history_buffer_size >= 0  # noqa: SLF001
        return {
            "counts": {name: getattr(module, name) for name in _COUNTS},
            "evicted": module._evicted_emb_indices if module._evicted else None,  # noqa: SLF001
            "ids": module._history_accumulator[:seen] if begun else None,  # noqa: SLF001
            "metadata": {name: held[:seen] for name, held in module._history_metadata.items()},  # noqa: SLF001
        }

    def set(self, held: Mapping[str, Any]) -> None:
        """Restore the result of `get`; raises `CheckpointMismatch` if the eviction policy differs."""
        module = self._module
        size, seen = (held["counts"][name] for name in ("_input_history_buffer_size", _COUNTS[2]))
        kept = module._eviction_policy.metadata_info  # noqa: SLF001
        names = {info.metadata_name for info in kept if info.is_history_metadata}
        if size >= 0 and names != held["metadata"].keys():
            raise CheckpointMismatch(
                f"the history has {sorted(held['metadata'])}, its eviction policy keeps {sorted(names)}",
                where=f"module {self._path}",
                remedy="build it with the eviction policy of the run that saved",
            )
        for name, value in held["counts"].items():
            setattr(module, name, value)
        if held["evicted"] is not None:
            module._evicted_emb_indices = self._to_device(held["evicted"])  # noqa: SLF001
        if size < 0:
            return
        module._history_accumulator = torch.empty(size, dtype=torch.int64, device=module.device)  # noqa: SLF001
        module._history_accumulator[:seen] = self._to_device(held["ids"])  # noqa: SLF001
        for name, values in held["metadata"].items():
            buffer = torch.zeros(size, dtype=torch.int64, device=module.device)
            buffer[:seen] = self._to_device(values)
            module.register_buffer(f"_history_{name}", buffer, persistent=False)
            module._history_metadata[name] = buffer  # noqa: SLF001

    def _to_device(self, value: Tensor) -> Tensor:
        return value.to(self._module.device, copy=True)
