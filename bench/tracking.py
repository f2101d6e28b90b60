"""Measures the cost of tracking: a DLRM step with and without it, the hooks' own time, and the scan at a snapshot.

`step_overhead` is paired: blocks of steps with and without hooks alternate on the same model in one process, and the
median over the pairs of (median with / median without - 1) is reported. On a shared machine it still scatters by
several percent. `hooks_share`, the median time inside tracking's own functions (by clock) over the median step, does
not. The bar is on `hooks_share`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deltashard.optim import RowWiseAdagrad
from deltashard.tracking.step_hook import StepHooks, Steps
from deltashard.tracking.tracking import Tracking, TrackingSettings
from measuring import limit
from torch import nn


class BenchDlrm(nn.Module):
    """A small MLPerf DLRM: eight sum-pooled tables, pairwise dot products, two MLPs."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, columns, mode="sum", sparse=True) for _ in range(8))
        self.bottom = _perceptron(13, 512, 256, columns)
        self.top = _perceptron(columns + 36, 512, 256, 1)
        self.register_buffer("upper", torch.triu_indices(9, 9, 1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        pooled = torch.stack([bottom, *(t(sparse[i]) for i, t in enumerate(self.tables))], dim=1)
        dots = torch.bmm(pooled, pooled.transpose(1, 2))[:, self.upper[0], self.upper[1]]
        return self.top(torch.cat([bottom, dots], dim=1)).squeeze(1)


def _perceptron(*widths: int) -> nn.Sequential:
    layers = [x for a, b in itertools.pairwise(widths) for x in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Clock:
    """Sums the time spent in chosen functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


@contextmanager
def clocked(clock: Clock, targets: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Time these methods, each given with its class or module, within the block."""
    saved = [(owner, name, getattr(owner, name)) for owner, name in targets]
    for owner, name, function in saved:
        setattr(owner, name, clock.timed(function))
    try:
        yield
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


CASES = {
    "sgd_sparse": lambda ps: torch.optim.SGD(ps, lr=0.01),
    "adagrad_sparse": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "sparse_adam": lambda ps: torch.optim.SparseAdam(ps, lr=0.01),
    "rowwise_adagrad_sparse": lambda ps: RowWiseAdagrad(ps, lr=0.01),
}
"""Optimizers of the tables with sparse gradients; for dense ones tracking hashes rows at no cost per step."""


def _case(
    name: str, *, rows: int, batch: int, pooling: int, blocks: int, steps: int, limit_s: float
) -> dict[str, Any]:
    factory = CASES[name]
    torch.manual_seed(0)
    model = BenchDlrm(rows, 32)
    optimizers = [
        factory(list(model.tables.parameters())),
        torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.01),
    ]
    # Skewed as real lookups are: the square of a uniform variable favours low ids.
    batches = [
        (torch.rand(batch, 13), (torch.rand(8, batch, pooling) ** 2 * rows).long(), torch.rand(batch).round())
        for _ in range(8)
    ]

    def train(
        n: int, tracking: Tracking | None, clock: Clock | None = None
    ) -> tuple[list[float], list[float]]:
        steps_s, hooks_s = [], []
        for i in range(n):
            start = time.perf_counter()
            before = clock.seconds if clock else 0.0
            dense, ids, label = batches[i % len(batches)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(dense, ids), label).backward()
            for optimizer in optimizers:
                optimizer.step()
            if tracking is not None:
                tracking.steps.end_step()
            steps_s.append(time.perf_counter() - start)
            hooks_s.append(clock.seconds - before if clock else 0.0)
        return steps_s, hooks_s

    settings = TrackingSettings()
    train(3, None)
    ratios, plain = [], []
    clock = Clock()
    until = time.monotonic() + limit_s
    for block in range(blocks):
        if block > 1 and time.monotonic() > until:  # on a loaded machine: fewer pairs, no timeout
            break
        order = (False, True) if block % 2 else (True, False)
        seconds = {}
        for tracked in order:
            tracking = Tracking(model, optimizers, settings=settings) if tracked else None
            seconds[tracked] = statistics.median(train(steps, tracking)[0])
            if tracking is not None:
                assert all(t.tracker == "gradients" for t in tracking.tables)
                tracking.close()
        plain.append(seconds[False])
        ratios.append(seconds[True] / seconds[False] - 1)
    with clocked(clock, [(StepHooks, "before"), (StepHooks, "after"), (Steps, "end_step")]):
        tracking = Tracking(model, optimizers, settings=settings)
        steps_s, hooks_s = train(steps * 2, tracking, clock)
    # Medians: on a loaded machine one preempted hook would count for hundreds.
    share = statistics.median(hooks_s) / statistics.median(steps_s)
    tracking.refresh()
    tracking.snapshot_taken(1, "all")
    tracking.committed(1, baseline=True)
    started = time.perf_counter()
    tracking.audit_sample()
    audit_s = time.perf_counter() - started
    train(steps, tracking)
    started = time.perf_counter()
    tracking.audit_before_commit()
    tracking.refresh()
    for table in tracking.tables:
        table.select_rows("since_commit")
    select_s = time.perf_counter() - started
    for table in tracking.tables:
        table.fall_back_to_hashing("measured", quiet=True)
    tracking.refresh()
    started = time.perf_counter()
    tracking.refresh()
    hash_s = time.perf_counter() - started
    weights = [t for table in tracking.tables for t in (table.param, *table.state_tensors().values())]
    tracking.close()
    return {
        "step_ms": statistics.median(plain) * 1e3,
        "step_overhead": statistics.median(ratios),
        "hooks_share": share,
        "audit_sample_ms": audit_s * 1e3,
        "select_ms": select_s * 1e3,
        "hash_look_ms": hash_s * 1e3,
        "hash_look_gb_per_s": sum(t.numel() * t.element_size() for t in weights) / hash_s / 1e9,
    }


TINY = ((1, False, 0.03), (26, False, 0.03), (400, True, 0.05))
"""Tables of 1,000 rows of 16 columns, whether each has a separate optimizer, and the bar: share of a step."""


def _tiny_step(tables: int, *, each: bool, repeat: int) -> dict[str, Any]:
    """Measure tracking's overhead on a step of 16 bags of two lookups, their sum, and SGD."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum", sparse=True) for _ in range(tables))
    groups = [[m.weight] for m in model] if each else [[m.weight for m in model]]
    optimizers = [torch.optim.SGD(params, lr=0.01) for params in groups]
    ids = torch.randint(0, 1000, (16, 2))

    def once() -> float:
        start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([m(ids) for m in model]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return time.perf_counter() - start

    plain, tracked = [], []
    for turn in range(repeat):
        for watched in (False, True) if turn % 2 else (True, False):
            tracking = None
            if watched:
                tracking = Tracking(model, optimizers, settings=TrackingSettings(hash_below_bytes=0))
            for _ in range(2):
                once()
            (tracked if watched else plain).extend(once() for _ in range(5))
            if tracking is not None:
                assert all(t.tracker == "gradients" for t in tracking.tables)
                tracking.close()
    base = statistics.median(plain)
    added = statistics.median(tracked) - base
    return {"step_us": base * 1e6, "added_us_per_table": added / tables * 1e6, "share": added / base}


def run(quick: bool = False) -> dict[str, Any]:
    """Measure; the bar is `hooks_share` <= 0.01 for every case."""
    size = {"rows": 100_000, "batch": 2048, "pooling": 4, "blocks": 4, "steps": 5, "limit_s": 5.0}
    if not quick:
        size |= {"rows": 200_000, "blocks": 10, "steps": 10, "limit_s": 25.0}
    cases = {name: _case(name, **size) for name in CASES}
    tiny = {
        tables: _tiny_step(tables, each=each, repeat=(2 if quick else 10) * (8 if tables < 400 else 1))
        for tables, each, _ in TINY
    }
    return {
        "tables": 8,
        "columns": 32,
        "threads": torch.get_num_threads(),
        **size,
        "cases": cases,
        "rows_of_table": size["rows"],
        "rows": [
            *(
                limit(f"tracking, share of a DLRM step, {name}", case["hooks_share"] * 100, "%", 1.0)
                for name, case in cases.items()
            ),
            limit(
                "tracking, per table and step: 400 tables with an optimizer each, against 26 under one",
                tiny[400]["added_us_per_table"] / tiny[26]["added_us_per_table"],
                "x",
                2.0,
            ),
            *(
                limit(
                    f"tracking, added to a tiny step, {tables} {'x table and optimizer' if each else 'tables'}, "
                    "sparse SGD",
                    tiny[tables]["share"] * 100,
                    "%",
                    bar * 100,
                )
                for tables, each, bar in TINY
            ),
        ],
        "tiny": {f"{tables}_sparse": found for tables, found in tiny.items()},
    }
