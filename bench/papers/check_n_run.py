"""Part 1, Check-N-Run (NSDI'22): bytes written and held by policy and bits, and cost and error of its quantizers.

Bytes are those of real checkpoints (`store_run`): of a real training on the baskets, and of a trace with production's
reuse (`reuse`) at four row widths. The page shows every mean of the trace next to its computed value (`ORACLE`).
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import codecs_reference as reference
import numpy as np
import reuse
from check_n_run_claims import check, headlines, page, plot
from deltashard_checkpoint.codecs.kernel_choice import active
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from demo_training import BATCH, DemoTraining, pair_table_rows
from measuring import log_progress
from quantizers import LOW_BITS, errors, latencies, tuned
from store_run import BITS, POLICIES, LiveTable, SavedCheckpoint, StoreRun, cost

__all__ = ["check", "headlines", "measure", "page", "plot"]
Found = dict[str, Any]
WIDTHS = (16, 32, 64, 128)
CHECKPOINTS = 16
"""Two periods of `intermittent`: each a baseline and seven increments."""
PERIOD = 8
SWEEP_BYTES = 12e6
"""Size of a table with its state. Bytes are linear in rows except index and entry, which weigh more in small tables."""
PAIR_ROWS = 1 << 18
"""Rows of the baskets' largest table; the demo's own table has four times as many."""
BASKET_CHECKPOINTS = 15
"""Three periods of the baskets, each a baseline and four increments."""
BASKET_STEPS = 36
"""Steps of 128 samples per interval, which change about a quarter of the rows."""
PAGE_YEAR = "2022"
"""The trace's histogram; the other one is also compared."""


def measure(quick: bool) -> Found:
    found: Found = {
        "kernels": _kernels(),
        "trace": _trace(20_000 if quick else 1_000_000),
    }
    widths = (64,) if quick else WIDTHS
    found["sweep"] = {}
    for columns in widths:
        log_progress(f"a trace at D = {columns}")
        found["sweep"][str(columns)] = _sweep(columns, quick=quick)
    log_progress("baskets")
    with tempfile.TemporaryDirectory(prefix="deltashard-papers-") as folder:
        found["baskets"], trained = _baskets(Path(folder), quick=quick)
    log_progress("quantizers")
    found["quantizers"] = _quantizers(trained, quick=quick)
    return found


def _kernels() -> str:
    kernels = active()
    level = f" ({kernels.LEVELS[kernels.choose_level()]})" if hasattr(kernels, "LEVELS") else ""
    return f"{kernels.__name__.rpartition('.')[2]}{level}"


# The trace


def _trace(rows: int) -> Found:
    out: Found = {
        "rows": rows,
        "wanted": reuse.S,
        "growth": reuse.growth(rows, reuse.Locality.published(PAGE_YEAR)),
    }
    for year in reuse.LOCALITY:
        wanted = reuse.Locality.published(year)
        one = next(reuse.intervals(rows, 1, wanted))
        made = reuse.Locality.of(one.counts)
        by_rows, by_lookups = made.distance(wanted)
        out[year] = {
            "by_rows": by_rows,
            "by_lookups": by_lookups,
            "mean": made.mean,
            "wanted_mean": wanted.mean,
            "lookups": int(one.counts.sum()),
            "rows": list(made.rows),
            "wanted_rows": list(wanted.rows),
        }
    return out


def _sweep(columns: int, *, quick: bool) -> Found:
    """Run every policy and bit width on one trace of a table trained by row-wise AdaGrad."""
    rows = int((4e6 if quick else SWEEP_BYTES) / (4 * columns + 4))
    rng = np.random.default_rng(columns)
    live = _table("table", reference.rows_like("gaussian", rows, columns, seed=columns))
    count = PERIOD if quick else CHECKPOINTS
    with (
        _runs([live]) as runs,
        StoreRun(tables=[live], policy="intermittent", bits=8, keep_last=3) as shipped,
    ):
        changed = np.empty(0, np.int64)
        for interval in [None, *reuse.intervals(rows, count - 1, reuse.Locality.published(PAGE_YEAR))]:
            if interval is not None:
                changed = interval.ids
                _step(live, interval, rng)
            for run in (*runs.values(), shipped):
                run.save([changed])
        out = _costs(runs)
        out |= {"rows": rows, "checkpoints": count, "restored": _restored(runs, [live])}
        out["shipped"] = _cost_of(shipped.saved, out["full_bytes"])
    return out


def _step(live: LiveTable, interval: reuse.IntervalLookups, rng: np.random.Generator) -> None:
    """Apply row-wise AdaGrad with gradients of equal size per lookup, all of an interval at once."""
    ids, counts = interval.ids, interval.counts
    gradient = rng.standard_normal((len(ids), live.weights.shape[1]), np.float32)
    gradient *= np.sqrt(counts, dtype=np.float32)[:, None]
    state = live.fields["sum"]
    state[ids] += np.square(gradient).mean(axis=1)
    live.weights[ids] -= 0.05 * gradient / (np.sqrt(state[ids])[:, None] + 1e-8)


def _table(fqn: str, weights: np.ndarray) -> LiveTable:
    rows, columns = weights.shape
    return LiveTable(
        schema=TableSchema(
            fqn=fqn, rows=rows, columns=columns, dtype="float32",
            fields=(FieldSpec(name="sum", kind="rowwise", dtype="float32"),),
        ),
        weights=weights,
        fields={"sum": np.zeros(rows, np.float32)},
    )  # fmt: skip


@contextlib.contextmanager
def _runs(tables: Sequence[LiveTable]) -> Iterator[dict[tuple[str, int], StoreRun]]:
    with contextlib.ExitStack() as stack:
        yield {
            (policy, bits): stack.enter_context(StoreRun(tables=tables, policy=policy, bits=bits))
            for policy in POLICIES
            for bits in BITS
        }


def _costs(runs: Mapping[tuple[str, int], StoreRun]) -> Found:
    full = fmean(each.written_bytes for each in runs["full", 32].saved)
    cells: Found = {policy: {} for policy in POLICIES}
    for (policy, bits), run in runs.items():
        cells[policy][str(bits)] = _cost_of(run.saved, full)
    return {"full_bytes": full, "cells": cells}


def _cost_of(saved: Sequence[SavedCheckpoint], full: float) -> Found:
    return {
        **asdict(cost(saved, full)),
        "written": [round(each.written_bytes / full, 5) for each in saved],
        "chain": [round(each.chain_bytes / full, 5) for each in saved],
        "baselines": [i for i, each in enumerate(saved) if each.baseline],
    }


def _restored(runs: Mapping[tuple[str, int], StoreRun], tables: Sequence[LiveTable]) -> Found:
    """Return for each bit width whether all policies restore the same rows and exact state; for fp32 the live rows."""
    out: Found = {}
    for bits in BITS:
        known = [(t.weights, t.fields) for t in tables] if bits == 32 else runs["full", bits].restored()
        out[str(bits)] = all(
            np.array_equal(weights, wanted)
            and all(np.array_equal(fields[name], live.fields[name]) for name in live.fields)
            for policy in POLICIES
            for (weights, fields), (wanted, _), live in zip(
                runs[policy, bits].restored(), known, tables, strict=True
            )
        )
    return out


# The baskets


def _baskets(folder: Path, *, quick: bool) -> tuple[Found, np.ndarray]:
    """Save the demo's training with a Checkpointer and with every policy and bit width; also return pair rows."""
    import baskets
    import deltashard
    from model import COLUMNS

    steps, count, rows = (6, 4, 1 << 15) if quick else (BASKET_STEPS, BASKET_CHECKPOINTS, PAIR_ROWS)
    with pair_table_rows(rows):
        retail = baskets.load()
        training = DemoTraining(retail, 1)
        model, optimizers = training.model, training.optimizers
        loader = baskets.training_loader(retail, batch_size=BATCH, seed=1)
        ckpt = deltashard.Checkpointer(
            model, optimizers, url=folder / "store", run="baskets", encoding="q8",
            differential="intermittent", keep_last=100, grace_s=None,
            # As in the paper: baselines are snapshots, never built from cached data.
            sidecar={"compact_after": 0, "synthetic_baselines": False},
        )  # fmt: skip
        ckpt.restore()
        loader = ckpt.wrap(loader)
        names = {id(p): name for name, p in model.named_parameters()}
        live: list[LiveTable] = []
        commits = []
        with ckpt, contextlib.ExitStack() as stack:
            runs: dict[tuple[str, int], StoreRun] = {}
            was: list[tuple[np.ndarray, np.ndarray]] = []
            begun, trained_s = time.perf_counter(), 0.0
            for step, batch in enumerate(loader, 1):
                training.train(batch)
                ckpt.step()
                if step % steps:
                    continue
                trained_s += time.perf_counter() - begun
                if not live:
                    live = [_live_table(names[id(p)], p, optimizers[0]) for p in model.tables()]
                    runs = stack.enter_context(_runs(live))
                changed = [
                    np.flatnonzero((t.weights != w).any(axis=1) | (t.fields["sum"] != s))
                    for t, (w, s) in zip(live, was, strict=True)
                ] if was else [np.empty(0, np.int64)] * len(live)  # fmt: skip
                was = [(t.weights.copy(), t.fields["sum"].copy()) for t in live]
                commits.append(ckpt.save().wait(300))
                for run in runs.values():
                    run.save(changed)
                begun = time.perf_counter()
                if len(commits) == count:
                    break
            out = _costs(runs)
            out["restored"] = _restored(runs, live)
        ours = runs["intermittent", 8].saved
        blobs = _blob_bytes(folder / "store")
        out["checkpointer"] = {
            "stored_bytes": [c.stored_bytes for c in commits],
            "blob_bytes": blobs,
            "row_bytes": sum(c.stored_bytes for c in commits) - sum(blobs),
            "rows": [c.rows for c in commits],
            "our_rows": [each.rows for each in ours],
            "our_bytes": sum(each.written_bytes for each in ours),
        }
        out |= {
            "rows": [len(t.weights) for t in live], "columns": COLUMNS, "steps": steps,
            "checkpoints": count, "trained_s": trained_s,
        }  # fmt: skip
        return out, live[-1].weights[changed[-1]].copy()


def _live_table(name: str, parameter: Any, optimizer: Any) -> LiveTable:
    weights = parameter.detach().numpy()
    made = _table(name, weights)
    made.fields = {"sum": optimizer.state[parameter]["sum"].numpy()}
    return made


def _blob_bytes(store: Path) -> list[int]:
    """Return for each checkpoint the bytes other than rows: dense parameters and their state, loader, generators."""
    from deltashard_checkpoint.format.frame import FrameKind
    from deltashard_checkpoint.log.commit_log import RunLog
    from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
    from deltashard_checkpoint.stores.file import FileStore

    files = FileStore(store)
    state = RunLog(files, "baskets").refresh()
    sizes = []
    for seq in sorted(state.checkpoints):
        opened = OpenCheckpoint.of(files, state, state.checkpoints[seq])
        own = [opened.indexes[part.index_key] for part in state.checkpoints[seq].parts]
        sizes.append(
            sum(p.info.length for index in own for p in index.places if p.info.kind is FrameKind.BLOB)
        )
    return sizes


# Quantizers


def _quantizers(trained: np.ndarray, *, quick: bool) -> Found:
    """Measure errors on rows of two distributions and on trained rows, and processor time of a row at 64 columns."""
    out: Found = {}
    rows = 1000 if quick else 4000
    data = {kind: reference.rows_like(kind, rows, 64) for kind in ("gaussian", "student")}
    some = np.random.default_rng(0).choice(len(trained), min(rows, len(trained)), replace=False)
    data["baskets"] = np.ascontiguousarray(trained[np.sort(some)])
    for kind, x in data.items():
        out[kind] = {}
        for bits in LOW_BITS:
            chosen = tuned(x, bits)
            out[kind][str(bits)] = {
                "errors": errors(x, bits, chosen),
                "chosen": f"refit of {chosen.starts} starts, {chosen.passes} passes",
            }
    x = reference.rows_like("gaussian", 2_000 if quick else 28_000, 64)
    out["latency_ns"] = {
        str(bits): latencies(x, bits, tuned(x, bits), seconds=0.1 if quick else 2.0) for bits in LOW_BITS
    }
    return out
