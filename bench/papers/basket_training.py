"""A real training that a bench can run hundreds of times: the demo's baskets, a shallow model, one pass.

The model is the demo's without its hidden layers and dropout. Four vectors of 32 floats: the basket's size (a line
in its logarithm), the mean of its items' rows, the candidate's row, the mean of the rows of all (candidate, item)
pairs, hashed as in the demo. The logit is a learned weighting of their elements and of their six dot products. The
model is smooth: a small change of the weights gives a small change of the loss (the loss of a deep model with dropout
moves by .1 % when its weights move by 1e-7).

Tables are updated by exact row-wise AdaGrad, the 199 dense parameters by AdaGrad. One thread adds in one order: two
runs of the same seed are equal bit for bit. Runs of one seed have the same samples, negatives and first weights.

The kernels release Python's lock, so that two threads train two models at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
Found = TypeVar("Found")

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
COLUMNS = 32
BATCH = 128
SAMPLES = 338_944
"""Samples of one pass: the training baskets' items in whole batches."""
STEPS = SAMPLES // BATCH
INITIAL_STD = 0.05
TABLE_RATE, DENSE_RATE = 0.1, 0.02
EPS = 1e-10
TABLES = ("items", "candidates", "pairs")
WORKERS = 2
SHALLOW = "a shallow model with three tables of 32 columns under row-wise AdaGrad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """S samples in the order of training, as arrays for the kernels."""

    context: I32
    """[S, 10] rows of `items`, the first `sizes` of each."""
    sizes: I32
    candidates: I32
    """[S, 2] rows of `candidates`; the first was in the basket."""
    pairs: I32
    """[S, 2, 10] rows of `pairs`."""
    log_sizes: F32
    """[S] logarithms of the baskets' sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """The data that all runs of one seed share."""

    seed: int
    bounds: tuple[tuple[int, int], ...]
    """Rows [first, last) of each of `TABLES` in the weights."""
    samples: Samples
    held_out: Samples
    first: ShallowModel

    def steps_rows(self, start: int, stop: int, table: int | None = None) -> Rows:
        """Return the rows that steps [start, stop) look up and change: int64, with repeats.

        Rows are numbered over all tables, or within one of `TABLES`.
        """
        s, at = self.samples, slice(start * BATCH, stop * BATCH)
        items = np.arange(s.context.shape[1])[None, :] < s.sizes[at, None]
        look_ups = (
            lambda: s.context[at][items],
            s.candidates[at].ravel,
            lambda: s.pairs[at][np.broadcast_to(items[:, None, :], s.pairs[at].shape)],
        )
        if table is not None:
            return look_ups[table]().astype(np.int64) - self.bounds[table][0]
        return np.concatenate([rows().astype(np.int64) for rows in look_ups])


@dataclass(slots=True, kw_only=True)
class ShallowModel:
    """Weights of all tables, concatenated, their AdaGrad accumulators, and the dense parameters likewise."""

    weights: F32
    """[R, COLUMNS]."""
    sums: F32
    """[R]."""
    dense: F32
    dense_sums: F32

    def copy(self) -> ShallowModel:
        return ShallowModel(
            weights=self.weights.copy(),
            sums=self.sums.copy(),
            dense=self.dense.copy(),
            dense_sums=self.dense_sums.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The quality of a finished pass."""

    progressive: float
    """Mean log loss of every batch before its update."""
    held_out: float
    auc: float

    def change(self, twin: Quality) -> dict[str, float]:
        """Return the change against the uninterrupted twin, in %; a loss above 0 is worse, an AUC below 0 is worse."""
        return {
            name: 100 * (getattr(self, name) / getattr(twin, name) - 1)
            for name in ("progressive", "held_out", "auc")
        }


@lru_cache(maxsize=1)
def _retail() -> Any:
    if str(DEMO) not in sys.path:
        sys.path.insert(0, str(DEMO))
    import baskets

    return baskets.load()


def _samples(batch: Any, pair_count: int, starts: Sequence[int]) -> Samples:
    from model import pair_rows  # the demo's module, on the path since `_retail`

    def narrow(rows: Any, first: int) -> I32:
        return np.ascontiguousarray(rows.numpy() + first, np.int32)

    return Samples(
        context=narrow(batch.context, starts[0]),
        sizes=narrow(batch.sizes, 0),
        candidates=narrow(batch.candidates, starts[1]),
        pairs=narrow(pair_rows(batch.candidates, batch.context) & (pair_count - 1), starts[2]),
        log_sizes=np.log(batch.basket_sizes.numpy()).astype(np.float32),
    )


def task(seed: int, *, pair_count: int, steps: int = STEPS) -> TrainingTask:
    """Return the first `steps` steps of the pass of `seed`; `pair_count`: rows of `pairs`, a power of 2 up to 2^20."""
    import torch

    retail = _retail()
    import baskets

    items = retail.item_count
    starts = (0, items, 2 * items, 2 * items + pair_count)
    training = baskets.HeldOutItems(retail.train, retail.train.items)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(training))[: steps * BATCH]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batch = training.__getitems__(order)
    (held_out,) = baskets.held_out_batches(retail, batch_size=1 << 20, seed=seed)
    dense = np.zeros(4 * COLUMNS + 6 + 2 * COLUMNS + 1, np.float32)
    dense[: 4 * COLUMNS] = rng.normal(0, 0.1, 4 * COLUMNS)
    dense[4 * COLUMNS : 4 * COLUMNS + 6] = 1
    dense[4 * COLUMNS + 6 : -1] = rng.normal(0, INITIAL_STD, 2 * COLUMNS)
    first = ShallowModel(
        weights=rng.normal(0, INITIAL_STD, (starts[-1], COLUMNS)).astype(np.float32),
        sums=np.zeros(starts[-1], np.float32),
        dense=dense,
        dense_sums=np.zeros_like(dense),
    )
    return TrainingTask(
        seed=seed,
        bounds=tuple(pairwise(starts)),
        samples=_samples(batch, pair_count, starts),
        held_out=_samples(held_out, pair_count, starts),
        first=first,
    )


class BasketTraining:
    """The training of one model over a task's steps."""

    def __init__(
        self, of: TrainingTask, model: ShallowModel, step: int = 0, losses: F64 | None = None
    ) -> None:
        """Continue at `step` from `model`, which is changed in place; `losses` are those of the steps before."""
        self.task = of
        self.model = model
        self.step = step
        self.losses = np.zeros(len(of.samples.sizes) // BATCH) if losses is None else losses.copy()

    def fork(self) -> BasketTraining:
        return BasketTraining(self.task, self.model.copy(), self.step, self.losses)

    def run(self, until: int) -> None:
        s, m = self.task.samples, self.model
        _train(
            m.weights, m.sums, m.dense, m.dense_sums,
            s.context, s.sizes, s.candidates, s.pairs, s.log_sizes,
            self.step, until, self.losses,
        )  # fmt: skip
        self.step = until

    def quality(self) -> Quality:
        h, m = self.task.held_out, self.model
        logits = np.empty((len(h.sizes), 2))
        _score(m.weights, m.dense, h.context, h.sizes, h.candidates, h.pairs, h.log_sizes, logits)
        losses = np.logaddexp(0, -logits[:, 0]) + np.logaddexp(0, logits[:, 1])
        ranks = np.sort(logits[:, 1])
        below = np.searchsorted(ranks, logits[:, 0], side="left") + np.searchsorted(
            ranks, logits[:, 0], side="right"
        )
        return Quality(
            progressive=float(self.losses[: self.step].mean()),
            held_out=float(losses.mean() / 2),
            auc=float(below.sum() / (2 * len(ranks) ** 2)),
        )


def compile_kernels() -> None:
    """Compile the kernels before the threads start, since both threads would compile them."""
    small = task(0, pair_count=1 << 10, steps=1)
    training = BasketTraining(small, small.first.copy())
    training.run(1)
    training.quality()


def paragraph(*sentences: str) -> str:
    return " ".join(sentences)


def run_parallel(jobs: Sequence[Callable[[], Found]], workers: int = WORKERS) -> list[Found]:
    with ThreadPoolExecutor(workers) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error (0 for a single value: unknown)."""
    several = np.asarray(values, float)
    error = several.std(ddof=1) / np.sqrt(len(several)) if len(several) > 1 else 0.0
    return float(several.mean()), float(error)


# Compiled once per process, before the threads; `fastmath` allows vectorized dot products.
_compiled = numba.njit(fastmath=True, nogil=True)


@_compiled
def _forward(weights, dense, context, size, log_size, candidate, pairs, vectors, reuse):
    """Fill `vectors` [4, D] and return the logit; with `reuse` the first two are already set by the other candidate."""
    d = weights.shape[1]
    lines, linear = dense[4 * d + 6 :], dense[: 4 * d]
    if not reuse:
        for k in range(d):
            vectors[0, k] = lines[k] * log_size + lines[d + k]
            vectors[1, k] = 0
        for i in range(size):
            row = weights[context[i]]
            for k in range(d):
                vectors[1, k] += row[k]
        for k in range(d):
            vectors[1, k] /= size
    for k in range(d):
        vectors[2, k] = weights[candidate, k]
        vectors[3, k] = 0
    for i in range(size):
        row = weights[pairs[i]]
        for k in range(d):
            vectors[3, k] += row[k]
    for k in range(d):
        vectors[3, k] /= size
    logit = dense[-1]
    for v in range(4):
        part = np.float32(0)
        for k in range(d):
            part += linear[v * d + k] * vectors[v, k]
        logit += part
    at = 4 * d
    for v in range(4):
        for u in range(v):
            part = np.float32(0)
            for k in range(d):
                part += vectors[u, k] * vectors[v, k]
            logit += dense[at] * part
            at += 1
    return logit


@_compiled
def _slot(row, slots, touched, count, gradients):
    """Return the position of a row's gradient in this batch, and the number of rows with a gradient."""
    if slots[row] < 0:
        slots[row] = count
        touched[count] = row
        gradients[count] = 0
        count += 1
    return slots[row], count


@_compiled
def _train(
    weights, sums, dense, dense_sums,
    context, sizes, candidates, pairs, log_sizes,
    start, stop, losses,
):  # fmt: skip
    """Train steps [start, stop): sum a batch's gradients per row, then update each such row once."""
    d, longest = weights.shape[1], context.shape[1]
    slots = np.full(len(weights), -1, np.int32)
    touched = np.empty(BATCH * (3 * longest + 2), np.int32)
    gradients = np.empty((len(touched), d), np.float32)
    vectors, back = np.empty((4, d), np.float32), np.empty((4, d), np.float32)
    for_basket = np.empty(d, np.float32)
    slope = np.empty(len(dense), np.float32)
    for step in range(start, stop):
        count, loss = 0, 0.0
        slope[:] = 0
        for s in range(step * BATCH, (step + 1) * BATCH):
            size = sizes[s]
            for_basket[:] = 0
            for c in range(2):
                logit = _forward(
                    weights, dense, context[s], size, log_sizes[s], candidates[s, c], pairs[s, c], vectors, c > 0
                )  # fmt: skip
                sign = logit if c > 0 else -logit
                loss += max(sign, 0.0) + np.log1p(np.exp(-abs(sign)))
                probability = 1 / (1 + np.exp(-logit))
                g = np.float32((probability - (1 - c)) / (2 * BATCH))
                for v in range(4):
                    for k in range(d):
                        slope[v * d + k] += g * vectors[v, k]
                        back[v, k] = g * dense[v * d + k]
                at = 4 * d
                for v in range(4):
                    for u in range(v):
                        weight, part = g * dense[at], np.float32(0)
                        for k in range(d):
                            part += vectors[u, k] * vectors[v, k]
                            back[u, k] += weight * vectors[v, k]
                            back[v, k] += weight * vectors[u, k]
                        slope[at] += g * part
                        at += 1
                slope[-1] += g
                for k in range(d):
                    slope[at + k] += back[0, k] * log_sizes[s]
                    slope[at + d + k] += back[0, k]
                    for_basket[k] += back[1, k]
                place, count = _slot(candidates[s, c], slots, touched, count, gradients)
                for k in range(d):
                    gradients[place, k] += back[2, k]
                share = np.float32(1 / size)
                for i in range(size):
                    place, count = _slot(pairs[s, c, i], slots, touched, count, gradients)
                    for k in range(d):
                        gradients[place, k] += share * back[3, k]
            share = np.float32(1 / size)
            for i in range(size):
                place, count = _slot(context[s, i], slots, touched, count, gradients)
                for k in range(d):
                    gradients[place, k] += share * for_basket[k]
        losses[step] = loss / (2 * BATCH)
        for i in range(count):
            row, square = touched[i], np.float32(0)
            slots[row] = -1
            for k in range(d):
                square += gradients[i, k] * gradients[i, k]
            sums[row] += square / d
            rate = np.float32(TABLE_RATE) / (np.sqrt(sums[row]) + np.float32(EPS))
            for k in range(d):
                weights[row, k] -= rate * gradients[i, k]
        for k in range(len(dense)):
            dense_sums[k] += slope[k] * slope[k]
            dense[k] -= np.float32(DENSE_RATE) * slope[k] / (np.sqrt(dense_sums[k]) + np.float32(EPS))


@_compiled
def _score(weights, dense, context, sizes, candidates, pairs, log_sizes, logits):
    """Return the logits [S, 2] of held-out samples."""
    vectors = np.empty((4, weights.shape[1]), np.float32)
    for s in range(len(sizes)):
        for c in range(2):
            logits[s, c] = _forward(
                weights, dense, context[s], sizes[s], log_sizes[s], candidates[s, c], pairs[s, c], vectors, c > 0
            )  # fmt: skip
