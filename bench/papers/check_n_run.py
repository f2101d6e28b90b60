"""Part 1, Check-N-Run (NSDI'22): bytes written and held by policy and bits, and what its quantizers cost and lose.

Bytes are those of real checkpoints (`store_run`): of a real training on the baskets, and of a trace with production's
reuse (`reuse`) at four widths of a row. Beside every mean of the trace stands what arithmetic says of it (`ORACLE`).
"""

from __future__ import annotations

import contextlib
import sys
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
from deltashard_checkpoint.codecs.kernel_choice import active
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from quantizers import ITERATIONS, LOW_BITS, errors, hours, latencies, tunings
from report import table
from store_run import BITS, POLICIES, LiveTable, Saved, StoreRun, cost

Found = dict[str, Any]
WIDTHS = (16, 32, 64, 128)
CHECKPOINTS = 16
"""Two of the periods that `intermittent` comes to: a baseline and seven increments."""
PERIOD = 8
SWEEP_BYTES = 12e6
"""Of a table with its state in memory. Bytes are linear in rows; what is not (index, entry) weighs more in small ones."""
PAIR_ROWS = 1 << 18
"""Of the baskets' largest table; the demo's own has four times as many."""
BASKET_CHECKPOINTS = 15
"""Three periods: there, a baseline and four increments."""
BASKET_STEPS = 36
"""Of 128 samples, to an interval: about a quarter of the rows."""
ORACLE = {
    16: {8: (5.3, 1.8), 4: (9.3, 3.2), 3: (10.6, 3.7), 2: (12.3, 4.3)},
    32: {8: (6.6, 2.3), 4: (12.0, 4.1), 3: (14.4, 5.0), 2: (18.0, 6.2)},
    64: {8: (7.5, 2.6), 4: (14.3, 4.9), 3: (17.8, 6.1), 2: (23.7, 8.2)},
    128: {8: (8.1, 2.8), 4: (15.8, 5.4), 3: (20.3, 6.9), 2: (28.3, 9.7)},
}
"""Columns -> bits -> (write reduction, mean capacity reduction), from S, 4 bytes of row state, bitmap ids and our scales."""
TOLERANCE = 0.05
PAPER_WRITE, PAPER_CAPACITY = (6.0, 17.0), (2.5, 8.0)
"""At 8 and at 2 bits."""
ERROR_ORACLE = {
    "gaussian": {
        2: (0.2214, 0.1783, 0.1273, 0.720), 3: (0.0948, 0.0763, 0.0632, 0.867), 4: (0.0443, 0.0356, 0.0290, 0.936),
    },
    "student": {2: (0.389, 0.242, 0.142, 0.676), 4: (0.0642, 0.0487, 0.0386, 0.939)},
}  # fmt: skip
"""Rows -> bits -> mean row L2 of symmetric, asymmetric, k-means, and greedy(25, .6) over asymmetric; 4,000 rows of 64."""
ERROR_TOLERANCE = 0.03
ORDER = ("k-means", "adaptive", "asymmetric", "symmetric")
PAGE_YEAR = "2022"
"""Of the histogram that the trace has; the other one is compared as well."""


def measure(quick: bool) -> Found:
    """All figures of the part."""
    found: Found = {"kernels": active().__name__.rpartition(".")[2], "trace": _trace(20_000 if quick else 1_000_000)}
    widths = (16, 64) if quick else WIDTHS
    found["sweep"] = {}
    for columns in widths:
        _say(f"a trace at D = {columns}")
        found["sweep"][str(columns)] = _sweep(columns, quick=quick)
    _say("baskets")
    with tempfile.TemporaryDirectory(prefix="deltashard-papers-") as folder:
        found["baskets"], trained = _baskets(Path(folder), quick=quick)
    _say("quantizers")
    found["quantizers"] = _quantizers(trained, quick=quick)
    found["headlines"] = _headlines(found)
    return found


# The trace


def _trace(rows: int) -> Found:
    out: Found = {"rows": rows, "wanted": reuse.S, "growth": reuse.growth(rows, reuse.Locality.published(PAGE_YEAR))}
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
    """Every policy and bits on one trace of one table with a row-wise sum, trained by row-wise AdaGrad."""
    rows = int((4e6 if quick else SWEEP_BYTES) / (4 * columns + 4))
    rng = np.random.default_rng(columns)
    live = _table("table", reference.rows_like("gaussian", rows, columns, seed=columns))
    count = PERIOD if quick else CHECKPOINTS
    with _runs([live]) as runs, StoreRun(
        tables=[live], policy="intermittent", bits=8, keep_last=3, remembers=False
    ) as shipped:
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


def _step(live: LiveTable, interval: reuse.Interval, rng: np.random.Generator) -> None:
    """Row-wise AdaGrad with gradients of one size for each lookup, those of an interval in one."""
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
    """One run of each policy and bits, of the same living tables."""
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


def _cost_of(saved: Sequence[Saved], full: float) -> Found:
    baseline = saved[0].written_bytes
    return {
        **asdict(cost(saved, full)),
        "written": [each.written_bytes / full for each in saved],
        "chain": [each.chain_bytes / full for each in saved],
        "held_share": [each.held_bytes / full for each in saved],
        "s": [each.written_bytes / baseline for each in saved],
        "baselines": [i for i, each in enumerate(saved) if each.baseline],
    }


def _restored(runs: Mapping[tuple[str, int], StoreRun], tables: Sequence[LiveTable]) -> Found:
    """Bits -> whether every policy's newest checkpoint restores the same rows and exact state; fp32: the living ones."""
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
    """The demo's training, saved by a Checkpointer and by every policy and bits; also the trained rows of its pairs."""
    import baskets
    import deltashard
    import model as demo
    import torch
    from deltashard.optim import RowWiseAdagrad

    steps, count, rows = (6, 4, 1 << 15) if quick else (BASKET_STEPS, BASKET_CHECKPOINTS, PAIR_ROWS)
    before, demo.PAIR_ROWS = demo.PAIR_ROWS, rows
    try:
        retail = baskets.load()
        torch.manual_seed(1)
        model = demo.BasketModel(retail.item_count)
        for_tables = RowWiseAdagrad(model.tables(), lr=0.05)
        for_dense = torch.optim.Adam(model.dense(), lr=1e-3)
        loader = baskets.training_loader(retail, batch_size=128, seed=1)
        ckpt = deltashard.Checkpointer(
            model, [for_tables, for_dense], url=folder / "store", run="baskets", encoding="q8",
            differential="intermittent", keep_last=100, grace_s=None, sidecar={"compact_after": 0},
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
                loss = demo.loss_of(model(batch))
                for_tables.zero_grad()
                for_dense.zero_grad()
                loss.backward()
                for_tables.step()
                for_dense.step()
                ckpt.step()
                if step % steps:
                    continue
                trained_s += time.perf_counter() - begun
                if not live:
                    live = [_living(names[id(p)], p, for_tables) for p in model.tables()]
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
            "rows": [len(t.weights) for t in live], "columns": demo.COLUMNS, "steps": steps,
            "checkpoints": count, "trained_s": trained_s,
        }  # fmt: skip
        return out, live[-1].weights[changed[-1]].copy()
    finally:
        demo.PAIR_ROWS = before


def _living(name: str, parameter: Any, optimizer: Any) -> LiveTable:
    """The table of a parameter: the very memory that is trained."""
    weights = parameter.detach().numpy()
    made = _table(name, weights)
    made.fields = {"sum": optimizer.state[parameter]["sum"].numpy()}
    return made


def _blob_bytes(store: Path) -> list[int]:
    """Of each checkpoint the bytes that are no rows: dense parameters and their state, loader, generators."""
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
    """Errors on rows of two distributions and on trained ones; processor time of a row at 64 columns."""
    out: Found = {}
    rows = 1000 if quick else 4000
    data = {kind: reference.rows_like(kind, rows, 64) for kind in ("gaussian", "student")}
    some = np.random.default_rng(0).choice(len(trained), min(rows, len(trained)), replace=False)
    data["baskets"] = np.ascontiguousarray(trained[np.sort(some)])
    for kind, x in data.items():
        out[kind] = {}
        for bits in LOW_BITS:
            tuned = tunings(x, bits)
            chosen = tuned["adaptive"].search
            out[kind][str(bits)] = {
                "errors": errors(x, bits, chosen),
                "chosen": _named(chosen),
                "chosen_of_grid": _named(tuned["greedy"].search),
            }
    x = reference.rows_like("gaussian", 2_000 if quick else 28_000, 64)
    out["latency_ns"] = {
        str(bits): latencies(x, bits, tunings(x, bits)["adaptive"].search, seconds=0.1 if quick else 2.0)
        for bits in LOW_BITS
    }
    return out


def _named(search: Any) -> str:
    if search.kind == "refit":
        return f"refit of {search.starts} starts, {search.passes} passes"
    return f"greedy, {search.bins} bins, ratio {search.ratio:g}" if search.kind == "greedy" else search.kind


# What is claimed


def _headlines(found: Found) -> list[Found]:
    rows = []
    sources = {f"a trace at D = {columns}": each for columns, each in found["sweep"].items()}
    sources["baskets, D = 32"] = found["baskets"]
    for what, paper, key, unit in (
        ("write bandwidth", PAPER_WRITE, "write", "Check-N-Run, bytes written, intermittent"),
        ("capacity", PAPER_CAPACITY, "capacity", "Check-N-Run, bytes held, intermittent"),
    ):
        del what
        for source, each in sources.items():
            cells = each["cells"]["intermittent"]
            ours = (cells["8"][key], cells["2"][key])
            said = ", ".join(
                f"{ratio:.1f} x at {bits} bit ({_verdict(ratio, wanted)})"
                for bits, ratio, wanted in zip((8, 2), ours, paper, strict=True)
            )
            rows.append(
                {
                    "what": f"{unit}: {source}",
                    "paper": f"{paper[0]:g}-{paper[1]:g} x less",
                    "ours": said,
                    "met": all(a >= b for a, b in zip(ours, paper, strict=True)),
                    "why": _why(source),
                }
            )
    gaussian = found["quantizers"]["gaussian"]["2"]["errors"]
    latency = found["quantizers"]["latency_ns"]["2"]
    rows.append(
        {
            "what": "Check-N-Run, adaptive quantization against k-means, 2 bit",
            "paper": "its accuracy at about 1/1000 of its latency",
            "ours": f"{gaussian['adaptive'] / gaussian['k-means']:.3f} x its error at "
            f"1/{latency['k-means'] / latency['adaptive']:.0f} of its latency",
            "met": None,
            "why": "the paper does not say which k-means; this one is compiled, as ours is",
        }
    )
    return rows


def _why(source: str) -> str:
    if "D = 16" in source:
        return "8 bytes of scale and bias (4 at 4 bits and fewer) and 4 of state beside 16 or 4 bytes of codes"
    if "D = 32" in source and "trace" in source:
        return "scales and state of a short row weigh too much"
    if "baskets" in source:
        return "the pairs of a basket are drawn more evenly than production's rows: an increment is larger"
    return ""


def _verdict(ours: float, paper: float) -> str:
    return "missed" if ours < paper else "reached" if ours < 1.05 * paper else "passed"


def check(found: Found) -> list[str]:
    """Orders that no machine changes, and figures that depend on none: what is violated."""
    wrong = []
    trace = found["trace"]
    for i, (made, wanted) in enumerate(zip(trace["growth"], trace["wanted"], strict=False), 1):
        if abs(made - wanted) > 0.01:
            wrong.append(f"after {i} intervals the trace has changed {made:.3f} of its rows, not {wanted}")
    for year in reuse.LOCALITY:
        if trace[year]["by_rows"] > 0.01:
            wrong.append(f"the trace's reuse is {trace[year]['by_rows']:.3f} from the histogram of {year}")
    for columns, sweep in found["sweep"].items():
        wrong += [f"D = {columns}: {each}" for each in _orders(sweep)]
        for bits, (write, capacity) in ORACLE[int(columns)].items():
            cell = sweep["cells"]["intermittent"][str(bits)]
            for key, wanted in (("write", write), ("capacity", capacity)):
                if abs(cell[key] / wanted - 1) > TOLERANCE:
                    wrong.append(f"D = {columns}, {bits} bit: {key} {cell[key]:.2f} x, {wanted} expected")
    wrong += [f"baskets: {each}" for each in _orders(found["baskets"])]
    said = found["baskets"]["checkpointer"]
    if abs(said["our_bytes"] / said["row_bytes"] - 1) > 0.02:
        wrong.append(f"baskets: {said['our_bytes']} bytes counted, a Checkpointer stored {said['row_bytes']}")
    for kind in ("gaussian", "student", "baskets"):
        for bits in LOW_BITS:
            had = found["quantizers"][kind][str(bits)]["errors"]
            if not all(had[a] < had[b] for a, b in zip(ORDER, ORDER[1:], strict=False)):
                wrong.append(f"{kind}, {bits} bit: errors are not in the order {' < '.join(ORDER)}: {had}")
    for kind, by_bits in ERROR_ORACLE.items():
        for bits, (symmetric, asymmetric, k_means, greedy) in by_bits.items():
            had = found["quantizers"][kind][str(bits)]["errors"]
            wanted = {
                "symmetric": symmetric, "asymmetric": asymmetric, "k-means": k_means,
                "greedy": greedy * asymmetric,
            }  # fmt: skip
            for name, value in wanted.items():
                if abs(had[name] / value - 1) > ERROR_TOLERANCE:
                    wrong.append(f"{kind}, {bits} bit: {name} has an error of {had[name]:.4f}, not {value:.4f}")
    return wrong


def _orders(of: Found) -> list[str]:
    """Of one source's cells."""
    wrong = [f"{bits} bit: policies restore different rows" for bits, same in of["restored"].items() if not same]
    cells = of["cells"]
    for policy in POLICIES:
        for key in ("write", "capacity"):
            ratios = [cells[policy][str(bits)][key] for bits in BITS]
            if ratios != sorted(ratios):
                wrong.append(f"{policy}: {key} does not grow with fewer bits: {ratios}")
    for bits in map(str, BITS):
        write = {policy: cells[policy][bits]["write"] for policy in POLICIES}
        if not write["consecutive"] > write["intermittent"] > write["full"]:
            wrong.append(f"{bits} bit: writes are not consecutive < intermittent < full: {write}")
        if not write["intermittent"] >= 0.99 * write["one-shot"]:
            wrong.append(f"{bits} bit: intermittent writes more than one-shot: {write}")
        held = {policy: cells[policy][bits]["capacity"] for policy in POLICIES}
        if not held["full"] >= held["intermittent"] > held["consecutive"]:
            wrong.append(f"{bits} bit: held are not full < intermittent < consecutive: {held}")
    return wrong


def _say(what: str) -> None:
    print(f"  {what} ...", file=sys.stderr, flush=True)
