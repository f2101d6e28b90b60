"""The arena's memory as a GPU sees it: registered with CUDA, it is written by the device itself, at the bus's speed.

Otherwise rows go through small pinned buffers, and a processor copies them from there. Registering takes 50 ms a GiB,
once an attachment: the pages behind the mapping are the arena's only as long as the attachment holds it, so that they
are let go of before it does.
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
"""By identity: the arena, and where its mapping begins; 0: CUDA does not take it."""


def pin(arena: Arena) -> bool:
    """Whether the device may write into the arena; it is registered the first time."""
    with _lock:
        held = _pinned.get(id(arena))
        if held is None:
            held = _pinned[id(arena)] = arena, _register(arena)
        return held[1] != 0


def unpin(arena: Arena) -> None:
    """Before it is unmapped, and with no copy under way."""
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
    except Exception as error:  # noqa: BLE001 - then rows go the other way
        _log.debug("the arena cannot be registered with CUDA", exc_info=error)
        return 0


def _succeeded(result: object, what: str) -> bool:
    if int(result) == 0:  # type: ignore[call-overload]  # torch's enum
        return True
    _log.debug("the arena was not %s with CUDA: %s", what, result)
    # CUDA keeps the error for whoever launches a kernel next: that is to be nobody of the program's.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    return False
