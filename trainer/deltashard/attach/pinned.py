"""Registers the arena's memory with CUDA, so that the device writes into it directly, at bus speed.

Without registration, rows are copied through small pinned buffers by a CPU. Registration takes 50 ms per GiB, once per
attachment. The pages belong to the arena only while the attachment exists, so they are unregistered before its end.
"""

from __future__ import annotations

import contextlib
import logging
import threading

import torch
from deltashard_proto.arena_layout import Arena

_log = logging.getLogger("deltashard")
_lock = threading.Lock()
_pinned: dict[int, tuple[Arena, int]] = {}
"""By identity: the arena, and the address of its mapping (0 if CUDA rejected it)."""


def pin(arena: Arena) -> bool:
    """Return whether the device can write into the arena; registers it at the first call."""
    with _lock:
        held = _pinned.get(id(arena))
        if held is None:
            held = _pinned[id(arena)] = arena, _register(arena)
        return held[1] != 0


def unpin(arena: Arena) -> None:
    """Unregister the arena, before it is unmapped and while no copy is running."""
    with _lock:
        _, address = _pinned.pop(id(arena), (arena, 0))
        if address:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch
            _succeeded(cudart.cudaHostUnregister(address), "unregistered")


def _register(arena: Arena) -> int:
    try:
        size = len(arena.view)
        address = torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr()
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch
        return address if _succeeded(cudart.cudaHostRegister(address, size, 0), "registered") else 0
    except Exception as error:  # noqa: BLE001 - rows are then copied through buffers
        _log.debug("the arena cannot be registered with CUDA", exc_info=error)
        return 0


def _succeeded(result: object, what: str) -> bool:
    if int(result) == 0:  # type: ignore[call-overload]  # torch's enum
        return True
    _log.debug("the arena was not %s with CUDA: %s", what, result)
    # CUDA keeps the error for the next kernel launch, which must not be one of the program.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    return False
