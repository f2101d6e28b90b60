# ruff: noqa: NPY002 - numpy's global generator is what is tested
"""Random number generators: captured, used, and restored."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from deltashard.errors import CheckpointMismatch, StateError
from deltashard.state.rng import apply_globals, apply_own, capture_globals, capture_own
from deltashard.state.value import decode_value, encode_value

from tests.support.gpu import needs_gpu


def draws() -> tuple[Any, ...]:
    return (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())))


def test_global_generators_resume() -> None:
    """The generators are Python's, numpy's (with its cached Gaussian) and torch's, through the typed tree."""
    draws()
    captured = capture_globals()
    first = draws()
    held = decode_value(encode_value(captured).to_bytes())
    for _ in range(2):
        apply_globals(held)
        assert draws() == first


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(5),
        lambda: np.random.default_rng(5),
        lambda: np.random.Generator(np.random.MT19937(5)),
        lambda: random.Random(5),
    ],
)
def test_user_generators_resume(make: Any) -> None:
    generator = make()

    def draw() -> float:
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return float(generator.random())

    draw()
    held = decode_value(encode_value(capture_own(generator)).to_bytes())
    first = draw()
    apply_own(generator, held)
    assert draw() == first


def test_another_kind_of_generator_is_refused() -> None:
    with pytest.raises(CheckpointMismatch):
        apply_own(random.Random(), capture_own(torch.Generator()))
    with pytest.raises(StateError):
        capture_own(random.SystemRandom())
    with pytest.raises(CheckpointMismatch, match="cuda"):  # both states are bytes with different meanings
        apply_own(torch.Generator(), {**capture_own(torch.Generator()), "device": "cuda"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_generators_are_not_dropped_silently() -> None:
    """A checkpoint of a CUDA run on a machine without CUDA is refused by default."""
    with pytest.raises(CheckpointMismatch, match="CUDA"):
        apply_globals({**capture_globals(), "cuda": [b"x"]})


@needs_gpu
def test_cuda_generators_are_restored() -> None:
    own = torch.Generator("cuda").manual_seed(3)
    torch.rand(5, device="cuda")
    held = decode_value(encode_value({"all": capture_globals(), "own": capture_own(own)}).to_bytes())
    drawn = [torch.rand(7, device="cuda"), torch.rand(7, device="cuda", generator=own)]
    apply_globals(held["all"])
    apply_own(own, held["own"])
    again = [torch.rand(7, device="cuda"), torch.rand(7, device="cuda", generator=own)]
    assert all(map(torch.equal, drawn, again))
