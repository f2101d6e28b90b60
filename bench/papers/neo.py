"""Part 5, Neo/ZionEX (ISCA'22): checkpoint bytes of optimizer state, bit-exact resume, and other shardings.

Three requirements of Neo for a checkpoint system: state by row and by weight stored with the weights, in few bytes; a
training with exact row-wise AdaGrad that resumes to the same bits; tables that are restored in any other sharding.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from demo_training import BATCH, DemoTraining, pair_table_rows
from measuring import log_progress
from neo_ranks import BAGS, COLUMNS
from report import picture, table

Found = dict[str, Any]
ROW_COLUMNS = 64
ENCODINGS = {"fp32": 32, "fp16": 16, "q8": 8, "q4": 4, "q2": 2}
STATES = ("fp32", "bf16")
STATE_VALUES = {"SGD": (0, 0), "row-wise AdaGrad": (1, 0), "AdaGrad": (0, 1), "Adam": (0, 2)}
"""Optimizer -> number of state values per row, and per weight."""
MODEL_WEIGHTS = 12e12
"""Parameters of the largest model that Neo trains, for the extrapolation to terabytes."""
PAPER_TB = (96.0, 24.0)
"""fp32 with AdaGrad, and fp16 with row-wise AdaGrad: Neo's own account of that model."""
RESHARD_S = 900.0


def measure(quick: bool) -> Found:
    with tempfile.TemporaryDirectory(prefix="deltashard-papers-") as folder:
        found: Found = {}
        log_progress("bytes of a row")
        found["bytes"] = _bytes(Path(folder), quick=quick)
        log_progress("bit-exact resume")
        found["resume"] = _resume(Path(folder), quick=quick)
        log_progress("other shardings")
        found["shardings"] = _shardings(Path(folder), quick=quick)
    return found


# Bytes


def _bytes(folder: Path, *, quick: bool) -> Found:
    """Encoding -> state encoding -> optimizer -> stored bytes of a row; one model has a table under each optimizer."""
    out: Found = {"rows": 4_000 if quick else 40_000, "columns": ROW_COLUMNS, "stored": {}}
    for encoding in ("fp32", "q4") if quick else ENCODINGS:
        for state in STATES:
            run = f"{encoding}-{state}"
            stored = out["stored"].setdefault(encoding, {})
            stored[state] = _stored(folder, run, encoding, state, out["rows"])
    return out


def _stored(folder: Path, run: str, encoding: str, state: str, rows: int) -> dict[str, float]:
    import deltashard
    import torch
    from deltashard.optim import RowWiseAdagrad
    from torch import nn

    torch.manual_seed(3)
    names = dict(zip(("sgd", "rowwise", "adagrad", "adam"), STATE_VALUES, strict=True))
    model = nn.ModuleDict({name: nn.Embedding(rows, ROW_COLUMNS, sparse=True) for name in names})
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD([model["sgd"].weight], lr=0.1),
        RowWiseAdagrad([model["rowwise"].weight], lr=0.1),
        torch.optim.Adagrad([model["adagrad"].weight], lr=0.1),
        torch.optim.SparseAdam([model["adam"].weight], lr=0.1),
    ]
    ckpt = deltashard.Checkpointer(
        model,
        optimizers,
        url=folder / "store",
        run=run,
        encoding=encoding,
        state_encoding=state,
        grace_s=None,
    )
    with ckpt:
        ckpt.restore()
        for bag in model.values():
            (bag(torch.arange(rows)) * torch.randn(rows, ROW_COLUMNS)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        ckpt.step()
        ckpt.save().wait(120)
    sizes: dict[str, int] = defaultdict(int)
    for info in _frames(folder / "store", run):
        sizes[info.table.partition(".")[0]] += info.stored_bytes
    return {names[name]: sizes[name] / rows for name in names}


def _frames(store: Path, run: str) -> list[Any]:
    from deltashard_checkpoint.format.frame import FrameKind
    from deltashard_checkpoint.log.commit_log import RunLog
    from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
    from deltashard_checkpoint.stores.file import FileStore

    files = FileStore(store)
    state = RunLog(files, run).refresh()
    newest = state.newest()
    assert newest is not None
    opened = OpenCheckpoint.of(files, state, newest)
    own = [opened.indexes[part.index_key] for part in newest.parts]
    return [p.info for index in own for p in index.places if p.info.kind is FrameKind.ROWS]


def expected_bytes(optimizer: str, encoding: str, state: str) -> float:
    """Return a row's bytes by the format: codes, scale and bias, row-wise state in fp32, point-wise state as chosen."""
    by_row, by_weight = STATE_VALUES[optimizer]
    scales = {"q8": 8, "q4": 4, "q2": 4}.get(encoding, 0)
    point = 2 if state == "bf16" else 4
    return ROW_COLUMNS * ENCODINGS[encoding] / 8 + scales + 4 * by_row + point * ROW_COLUMNS * by_weight


# Resume


class _TrainingInterrupted(Exception):
    """Ends the training in the middle."""


def _resume(folder: Path, *, quick: bool) -> Found:
    """Run the demo's training under exact row-wise AdaGrad: uninterrupted, and ended by an exception and resumed."""
    from model import COLUMNS as PAIR_COLUMNS

    steps, save_at, dies_at = (12, 5, 8) if quick else (60, 25, 40)
    pairs = 1 << 14 if quick else 1 << 17
    with pair_table_rows(pairs):
        whole = _trained(None, 5, steps)
        try:
            _trained(folder / "store", 5, steps, save_at=save_at, dies_at=dies_at)
        except _TrainingInterrupted:
            pass
        else:
            raise AssertionError("the training did not end in the middle")
        again = _trained(folder / "store", 77, steps)  # a new model with other rows and another seed
    return {
        "steps": steps, "saved_at": save_at, "died_at": dies_at, "resumed_at": again["begun"],
        "pairs": [pairs, PAIR_COLUMNS],
        "uninterrupted": whole["hash"], "resumed": again["hash"],
        "losses_equal": whole["losses"][again["begun"] :] == again["losses"],
    }  # fmt: skip


def _trained(
    store: Path | None, seed: int, steps: int, *, save_at: int | None = None, dies_at: int | None = None
) -> Found:
    import baskets
    import deltashard

    retail = baskets.load()
    training = DemoTraining(retail, seed)
    model, optimizers = training.model, training.optimizers
    loader = baskets.training_loader(retail, batch_size=BATCH, seed=seed)
    ckpt, begun = None, 0
    if store is not None:
        ckpt = deltashard.Checkpointer(
            model, optimizers, url=store, run="resume", encoding="fp32", grace_s=None
        )
    losses: list[float] = []
    try:
        if ckpt is not None:
            resumed = ckpt.restore()
            begun = resumed.step if resumed else 0
            loader = ckpt.wrap(loader)
        step = begun
        for batch in loader:
            losses.append(training.train(batch))
            step += 1
            if ckpt is not None:
                ckpt.step()
                if step == save_at:
                    ckpt.save().wait(120)
            if step == dies_at:
                raise _TrainingInterrupted
            if step == steps:
                break
    finally:
        if ckpt is not None:
            ckpt.__exit__(*sys.exc_info())
    return {"begun": begun, "losses": losses, "hash": _hash(model, optimizers)}


def _hash(model: Any, optimizers: list[Any]) -> str:
    import torch

    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    for optimizer in optimizers:
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in sorted(state.items()):
                digest.update(f"{number} {key}".encode() + value.numpy().tobytes())
    return digest.hexdigest()


# Shardings


def _shardings(folder: Path, *, quick: bool) -> Found:
    """Compare, for pairs of plans, the state saved in one sharding with the state restored in another, by cell."""
    saved = [("row_wise", 2)] if quick else [("row_wise", 2), ("column_wise", 2), ("table_wise", 2)]
    restored = (
        [("row_wise", 1), ("column_wise", 2)]
        if quick
        else [("row_wise", 1), ("row_wise", 2), ("row_wise", 3), ("column_wise", 2), ("table_wise", 2)]
    )
    stages: list[list[Any]] = [["save", _name("saved", *each), *each, ""] for each in saved]
    stages += [
        ["restore", f"{_name('saved', *then)}-as-{_name('', *now)}", *now, _name("saved", *then)]
        for then in saved
        for now in restored
    ]
    work = folder / "ranks"
    work.mkdir()
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "neo_ranks.py"), str(work), json.dumps(stages)],
        capture_output=True, text=True, timeout=RESHARD_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"ranks ended with {done.returncode}: {done.stderr[-3000:]}")
    pairs = []
    plans = {name: f"{sharding}, {world}" for what, name, sharding, world, _ in stages if what == "save"}
    for what, name, sharding, world, source in stages:
        if what == "restore":
            was, now = gathered(work, source), gathered(work, name)
            pairs.append({"saved": plans[source], "restored": f"{sharding}, {world}"} | compared(was, now))
    return {"tables": BAGS, "columns": COLUMNS, "pairs": pairs}


def _name(prefix: str, sharding: str, world: int) -> str:
    return f"{prefix}-{sharding.replace('_', '-')}-{world}".removeprefix("-")


def gathered(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Return whole tables and their state from all ranks' files: `table|section` -> values.

    Each shard of a table split by columns has an accumulator: the whole one is their mean by width.
    """
    whole: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob(f"{name}-[0-9].npz")):
        for place, values in np.load(path).items():
            fqn, rows, columns, section = place.split("|")
            (a, b), (c, d) = (map(int, each.split(":")) for each in (rows, columns))
            height = BAGS[fqn.split(".")[-2]]
            if values.ndim == 2:
                whole.setdefault(f"{fqn}|{section}", np.full((height, COLUMNS), np.nan, np.float32))[
                    a:b, c:d
                ] = values
            else:
                held = whole.setdefault(f"{fqn}|{section}", np.zeros(height, np.float64))
                held[a:b] += values.astype(np.float64) * ((d - c) / COLUMNS)
    return whole


def compared(was: dict[str, np.ndarray], now: dict[str, np.ndarray]) -> Found:
    """Return whether weights are equal to the bit, and the greatest relative difference of the accumulators."""
    weights = [name for name in was if name.endswith("|weights")]
    state = [name for name in was if name not in weights]
    differences = [
        float((np.abs(was[name] - now[name]) / np.maximum(np.abs(was[name]), 1e-30)).max()) for name in state
    ]
    return {
        "tables": len(weights),
        "rows": sum(len(was[name]) for name in weights),
        "weights_equal": was.keys() == now.keys() and all(np.array_equal(was[n], now[n]) for n in weights),
        "state": max(differences),
        "trained_rows": int(sum((was[name] > 0).sum() for name in state)),
    }


# Claims


def headlines(found: Found) -> list[Found]:
    stored = found["bytes"]["stored"]
    naive = _terabytes(stored["fp32"]["fp32"]["AdaGrad"])
    encoding = "fp16" if "fp16" in stored else "q4"
    lean = _terabytes(stored[encoding]["fp32"]["row-wise AdaGrad"])
    fewest = "q2" if "q2" in stored else "q4"
    resume, pairs = found["resume"], found["shardings"]["pairs"]
    equal = [pair for pair in pairs if pair["weights_equal"]]
    return [
        {
            "what": f"Neo: state of 12 T weights, fp32 with AdaGrad against {encoding} with row-wise AdaGrad",
            "paper": f"{PAPER_TB[0]:.0f} TB, about {PAPER_TB[1]:.0f} TB",
            "ours": f"{naive:.0f} TB, {lean:.1f} TB in the store "
            f"({_terabytes(stored[fewest]['fp32']['row-wise AdaGrad']):.1f} TB at {fewest})",
            "met": lean <= PAPER_TB[1] * 1.1,
            "why": "scales of quantized rows, and 4 bytes of state",
        },
        {
            "what": "Neo: a training resumed with exact row-wise AdaGrad is deterministic",
            "paper": "bit-identical",
            "ours": f"bit-identical at step {resume['steps']}, resumed at step {resume['resumed_at']}"
            if resume["uninterrupted"] == resume["resumed"]
            else "another state",
            "met": resume["uninterrupted"] == resume["resumed"],
            "why": "the state at the end differs",
        },
        {
            "what": "Neo: tables sharded by row, by column or whole restore on other numbers of ranks",
            "paper": "a new sharding plan per job",
            "ours": f"{len(equal)} of {len(pairs)} pairs of plans restore equal rows",
            "met": len(equal) == len(pairs),
            "why": "rows differ",
        },
    ]


def _terabytes(row_bytes: float) -> float:
    return MODEL_WEIGHTS / ROW_COLUMNS * row_bytes / 1e12


def check(found: Found) -> list[str]:
    """Check what holds on any machine: bytes are the format's, states and rows are equal."""
    wrong = []
    for encoding, by_state in found["bytes"]["stored"].items():
        for state, by_optimizer in by_state.items():
            for optimizer, stored in by_optimizer.items():
                wanted = expected_bytes(optimizer, encoding, state)
                if not wanted <= stored <= 1.01 * wanted + 0.1:
                    wrong.append(
                        f"{optimizer}, {encoding}, state {state}: {stored:.2f} bytes a row, {wanted} expected"
                    )
    resume = found["resume"]
    if resume["uninterrupted"] != resume["resumed"] or not resume["losses_equal"]:
        wrong.append("a resumed training under exact row-wise AdaGrad is not the uninterrupted one")
    if resume["resumed_at"] != resume["saved_at"]:
        wrong.append(f"resumed at step {resume['resumed_at']}, saved at {resume['saved_at']}")
    for pair in found["shardings"]["pairs"]:
        if not pair["weights_equal"]:
            wrong.append(f"rows saved as {pair['saved']} are others when restored as {pair['restored']}")
        if pair["state"] > (1e-6 if "column" in pair["saved"] + pair["restored"] else 0):
            wrong.append(
                f"state saved as {pair['saved']} is {pair['state']:.2g} off when restored as "
                f"{pair['restored']}"
            )
        if not pair["trained_rows"]:
            wrong.append(f"no row had been trained that was saved as {pair['saved']}")
    return wrong


def page(found: Found) -> str:
    stored = found["bytes"]["stored"]
    sizes = ", ".join(
        f"{_terabytes(stored[encoding]['fp32']['row-wise AdaGrad']):.1f} TB at {encoding}"
        for encoding in ("fp16", "q8", "q2")
        if encoding in stored
    )
    naive = f"{_terabytes(stored['fp32']['fp32']['AdaGrad']):.1f} TB at fp32 under AdaGrad"
    return "\n\n".join(
        [
            "## Neo",
            (
                "Neo trains models of up to 12 T weights. For checkpoints this requires little optimizer state, "
                "deterministic resumption and restores under another sharding."
            ),
            "### Bytes of optimizer state",
            (
                f"One model has a table of {found['bytes']['rows']:,} rows of {ROW_COLUMNS} columns under each "
                "optimizer and trains every row once. The table shows the stored bytes per row, with row ids and "
                "frame headers, from the index of its checkpoint. CI compares them with the format. Row-wise state is "
                "always exact; bf16 applies to state per weight."
            ),
            _bytes_table(stored),
            "![stored bytes per row](papers/neo_bytes.svg)",
            (
                f"Extrapolated to 12 T weights in rows of {ROW_COLUMNS}, with fp32 state: {naive}; under row-wise "
                f"AdaGrad {sizes}."
            ),
            "### Bit-identical resumption",
            _of_resume(found["resume"]),
            "### Other shardings",
            _of_shardings(found["shardings"]),
            _pairs_table(found["shardings"]["pairs"]),
        ]
    )


def _bytes_table(stored: Found) -> str:
    rows = [
        [f"weights {encoding}, state {state}", *(f"{by_optimizer[name]:.1f}" for name in STATE_VALUES)]
        for encoding, by_state in stored.items()
        for state, by_optimizer in by_state.items()
    ]
    return table(["bytes a row", *STATE_VALUES], rows)


def _of_resume(of: Found) -> str:
    equal = of["uninterrupted"] == of["resumed"]
    return (
        f"The demo's model (pairs: {of['pairs'][0]:,} rows of {of['pairs'][1]} columns) trains with dropout and random "
        "negatives, its tables under exact row-wise AdaGrad and its dense parameters under Adam. It is saved in fp32 "
        f"at step {of['saved_at']} and interrupted at step {of['died_at']}. A new model with other initial values and "
        f"another seed restores step {of['resumed_at']} and trains to step {of['steps']}. The SHA-256 over all "
        f"parameters, optimizer state and torch's generator is then `{of['resumed'][:16]}`, which "
        f"{'equals' if equal else 'differs from'} the uninterrupted training (`{of['uninterrupted'][:16]}`). The "
        f"losses of the steps in between are {'equal' if of['losses_equal'] else 'different'} too. "
        "`tests/programs/test_cases.py` covers kills by SIGKILL under each optimizer."
    )


def _of_shardings(of: Found) -> str:
    tables = ", ".join(f"{rows:,}" for rows in of["tables"].values())
    return (
        f"TorchRec on CPUs, with one process per rank over gloo, trains tables of {tables} rows of {of['columns']} "
        "columns with fused exact row-wise AdaGrad. It saves after two of three steps (a baseline and an increment) "
        "in one sharding, restores in another into a model with other values, and compares every cell. A table split "
        "by columns has one accumulator per shard; a restore in another sharding uses their mean, weighted by "
        "columns, which is rounded. `tests/integration/trainer/ranks/test_sharded_group.py` covers all shardings on "
        f"two and four ranks. {_restored_rows(of['pairs'])} The table shows the accumulators; the number after a "
        "sharding is its ranks:"
    )


def _restored_rows(pairs: list[Found]) -> str:
    wrong = [f"{pair['saved']} restored as {pair['restored']}" for pair in pairs if not pair["weights_equal"]]
    if wrong:
        return f"**Rows differ** for {'; '.join(wrong)}."
    return f"All {pairs[0]['rows']:,} rows are equal for every pair."


def _pairs_table(pairs: list[Found]) -> str:
    restored = list(dict.fromkeys(pair["restored"] for pair in pairs))
    state = {(pair["saved"], pair["restored"]): pair["state"] for pair in pairs}
    rows = [
        [saved, *("equal" if state[saved, to] == 0 else f"within {state[saved, to]:.1e}" for to in restored)]
        for saved in dict.fromkeys(pair["saved"] for pair in pairs)
    ]
    return table(["saved as; restored as", *restored], rows)


def plot(found: Found, folder: Path) -> None:
    from matplotlib import pyplot as plt

    stored = found["bytes"]["stored"]
    bars = [(encoding, state) for encoding in stored for state in stored[encoding]]
    with picture(folder / "neo_bytes.svg") as ax:
        for i, (encoding, state) in enumerate(bars):
            at = np.arange(len(STATE_VALUES)) + (i - (len(bars) - 1) / 2) * 0.8 / len(bars)
            colour = plt.get_cmap("viridis")(list(stored).index(encoding) / len(stored))
            ax.bar(
                at, [stored[encoding][state][name] for name in STATE_VALUES], 0.75 / len(bars),
                color=colour, alpha=1 if state == "fp32" else 0.5, label=f"{encoding}, state {state}",
            )  # fmt: skip
        ax.set_xticks(range(len(STATE_VALUES)), list(STATE_VALUES))
        ax.grid(axis="x", visible=False)
        ax.set_ylabel(f"stored bytes per row, D = {ROW_COLUMNS}")
        ax.legend(frameon=False, fontsize=7, ncols=2)
