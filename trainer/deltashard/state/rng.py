"""Random number generators that a training step draws from, captured and applied as plain trees.

The *global* generators are Python's `random`, NumPy's legacy `numpy.random`, torch's default CPU generator and, once
CUDA is in use, every device's default generator. *Own* generators (`torch.Generator`, `numpy.random.Generator`,
`numpy.random.RandomState`, `random.Random`) are user objects, captured by kind. A captured value contains only ints,
floats, tuples, bytes and arrays, so the typed tree stores it unchanged and nothing is ever unpickled.

Capturing copies: later draws do not change a captured value.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltashard.errors import CheckpointMismatch, StateError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _python_state(generator_state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert `random`'s state, with its 625 words as one array: a leaf of the tree instead of 625."""
    version, words, gauss = generator_state
    return version, np.array(words, dtype=np.uint32), gauss


def _python_state_of(captured: tuple[Any, ...]) -> tuple[Any, ...]:
    version, words, gauss = captured
    return version, tuple(int(word) for word in words), gauss


def capture_globals() -> dict[str, Any]:
    """Return the state of all global generators as a tree. About 30 microseconds without CUDA."""
    captured: dict[str, Any] = {
        "python": _python_state(random.getstate()),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the legacy global is what programs draw from
        "torch": _bytes_of(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
        captured["cuda"] = [_bytes_of(state.cpu()) for state in torch.cuda.get_rng_state_all()]
    return captured


def apply_globals(captured: Mapping[str, Any]) -> None:
    """Apply the result of `capture_globals`.

    Raises:
        CheckpointMismatch: the captured process had more CUDA devices than this one.
    """
    random.setstate(_python_state_of(captured["python"]))
    np.random.set_state(captured["numpy"])  # noqa: NPY002 - see capture_globals
    torch.set_rng_state(_tensor_of(captured["torch"]))
    cuda = captured.get("cuda")
    if cuda:
        if not torch.cuda.is_available() or torch.cuda.device_count() < len(cuda):
            have = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise CheckpointMismatch(
                f"the checkpoint holds generators of {len(cuda)} CUDA devices, this process sees {have}",
                where="rng",
                remedy="resume on as many devices, or restore(strict=False) to leave the CUDA generators alone",
            )
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(_tensor_of(state), device)


def reseed_for_rank(rank: int, attempt: int) -> None:
    """Reseed the global generators from their state, `rank` and `attempt`, differently on every rank."""
    drawn = int(torch.randint(1 << 62, ()).item())
    words = np.random.SeedSequence([drawn, rank, attempt]).generate_state(3, np.uint64)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1] & np.uint64(0xFFFFFFFF)))  # noqa: NPY002 - the legacy global is drawn from
    random.seed(int(words[2]))


def is_generator(value: object) -> bool:
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def capture_own(generator: Generator) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        return {
            "kind": "torch",
            "device": generator.device.type,
            "state": _bytes_of(generator.get_state().cpu()),
        }
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": dict(generator.bit_generator.state)}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy.legacy", "state": generator.get_state(legacy=False)}
    if isinstance(generator, random.SystemRandom):
        raise StateError(
            "random.SystemRandom has no state", where="state=", remedy="use random.Random or leave it out"
        )
    return {"kind": "python", "state": _python_state(generator.getstate())}


def apply_own(generator: Generator, captured: Mapping[str, Any]) -> None:
    """Apply a captured state to a generator of the same kind.

    Raises:
        CheckpointMismatch: the generator's kind or device differs from the captured one.
    """
    kind = captured.get("kind")
    if kind == "torch" and isinstance(generator, torch.Generator):
        there, here = captured.get("device", "cpu"), generator.device.type
        if there != here:
            raise CheckpointMismatch(
                f"the checkpoint holds a torch generator of {there}, the program's is of {here}",
                where="state=",
                remedy="give a generator of the same device under the same name",
            )
        generator.set_state(_tensor_of(captured["state"]))
    elif kind == "numpy" and isinstance(generator, np.random.Generator):
        generator.bit_generator.state = captured["state"]
    elif kind == "numpy.legacy" and isinstance(generator, np.random.RandomState):
        generator.set_state(captured["state"])
    elif kind == "python" and isinstance(generator, random.Random):
        generator.setstate(_python_state_of(captured["state"]))
    else:
        raise CheckpointMismatch(
            f"the checkpoint holds a {kind} generator, the program a {type(generator).__name__}",
            where="state=",
            remedy="give the same kind of generator under the same name",
        )
