"""Generated loader programs, interrupted at any step and resumed: the result is exact or there is a warning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from deltashard import ResumableSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.integration.trainer.loader.loader_program import LOOPS, loop
from tests.integration.trainer.loader.simulated_trainer import resumed

SAMPLES = 22
KINDS = ["shuffled", "sequential", "resumable", "stream", "list"]
NOT_DRAWN = {"drawn head", "prefetched by a thread", "pipeline over epochs", "peeked"}
"""The loop itself draws, prefetched batches draw during training, or the loop ends with an epoch."""
NOISE = ["none", "torch", "numpy", "own", "rare", "count", "time"]


class NoisyItems(Dataset[Any]):
    """The numbers 0..n-1 with optional random noise."""

    def __init__(self, noise: str) -> None:
        self.noise, self.own, self.reads = noise, np.random.default_rng(5), 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> float:
        self.reads += 1
        drawn = {
            "none": lambda: 0.0,
            "torch": lambda: float(torch.rand(())),
            "numpy": np.random.rand,
            "own": self.own.random,
            "rare": lambda: float(torch.rand(())) if i in (3, 11) else 0.0,
            "count": lambda: float(self.reads),
            "time": lambda: float(int.from_bytes(os.urandom(2), "big")),
        }[self.noise]()
        return i + 100.0 * drawn


class NoisyStream(IterableDataset[Any]):
    """The same items as an iterable dataset in the dataset's order."""

    def __init__(self, noise: str) -> None:
        self.items = NoisyItems(noise)
        self.own = self.items.own

    def __iter__(self) -> Iterator[float]:
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.items[i] for i in range(start, SAMPLES, step))


def made(kind: str, noise: str, generator: bool, **options: Any) -> Any:
    if generator:
        options["generator"] = torch.Generator().manual_seed(8)
    match kind:
        case "list":
            return [[2.0 * i, 2.0 * i + 1] for i in range(SAMPLES // 2)]
        case "stream":
            return DataLoader(NoisyStream(noise), **options)
        case "resumable":
            return DataLoader(NoisyItems(noise), sampler=ResumableSampler(SAMPLES, seed=2), **options)
    return DataLoader(NoisyItems(noise), shuffle=kind == "shuffled", **options)


@settings(max_examples=int(os.environ.get("DELTASHARD_PROGRAMS", "30")))
@given(data=st.data())
def test_drawn_loader_resumes_exactly_or_warns(data: st.DataObject) -> None:
    """The strategy combines all parts. Few cases have workers, which start slowly.

    State outside of generators (a count of reads, the time) is compared with the last batch of the epoch, so at an epoch's
    beginning there is no comparison.
    """

    def one_of(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    workers, noise = one_of(*[0] * 9, 1), one_of(*NOISE)
    options = {"num_workers": workers, "persistent_workers": bool(workers) and data.draw(st.booleans())}
    options["batch_size"] = data.draw(st.integers(2, 5))
    make = partial(made, one_of(*KINDS), noise, data.draw(st.booleans()), **options)
    how = one_of(*sorted(LOOPS.keys() - NOT_DRAWN))
    other = make if how in ("zipped", "cycled", "nested", "alternated") else None
    # Samples that draw while earlier batches are trained on do not resume exactly, which is not detected (docs/guarantees.md).
    pipelined = "pipeline" in how and noise in ("none", "count", "time") and data.draw(st.booleans())
    program = loop(make, how, other, skip=one_of("auto", "auto", "sampler", "replay"), pipelined=pipelined)
    kill = data.draw(st.integers(1, 17))
    outcome = resumed(program, kill, kill + 40)
    # At an epoch's end a zip stops at its exhausted first loader, so the second one compares no batch either.
    epoch_ended = how == "zipped" and kill % -(-SAMPLES // options["batch_size"]) == 0
    hidden = noise in ("count", "time") and (epoch_ended or not any(outcome.delivered))
    assert outcome.exact or outcome.warnings or hidden


@pytest.mark.xfail(
    strict=True, reason="samples draw while earlier batches are trained on: not exact, not detected"
)
def test_pipelined_samples_that_draw_resume_exactly_or_warn() -> None:
    program = loop(partial(made, "shuffled", "torch", False, batch_size=2), "pipelined", pipelined=True)
    outcome = resumed(program, 5, 45)
    assert outcome.exact or outcome.warnings


@pytest.mark.xfail(
    strict=True, reason="at the epoch's end a zip never draws from its second loader: not detected"
)
def test_zipped_streams_that_count_reads_resume_exactly_or_warn_at_an_epochs_end() -> None:
    make = partial(made, "stream", "count", False, batch_size=4)
    outcome = resumed(loop(make, "zipped", make), 6, 20)
    assert outcome.exact or outcome.warnings
