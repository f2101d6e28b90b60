"""Part 3, CheckFreq: one pass over real data with restarts, and which samples it trains on.

- *whole*: uninterrupted;
- *resumed*: ended several times, and resumed by a Checkpointer with the loader's position: the same pass;
- *shuffled*: restored at the same steps, into a loader that restarts under another shuffle: an epoch that loses its
  position, as CheckFreq's authors found it in the loaders of their time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from demo_training import DemoTraining, pair_table_rows
from report import table

Found = dict[str, Any]
BATCH = 256
PAIR_ROWS = 1 << 16
STEPS_AFTER_SAVE = 10
"""Steps between a save and the end of the process: they are trained again."""


class _TrainingKilled(Exception):
    """Ends a training process."""


def measure(folder: Path, *, quick: bool) -> Found:
    import baskets

    retail = baskets.load()
    share = 0.03 if quick else 0.25
    seeds = [1] if quick else [1, 2, 3]
    places = (0.5,) if quick else (0.25, 0.5, 0.75)
    data = _Data(retail, share)
    steps = len(data.train) // BATCH
    saves = [round(steps * place) for place in places]
    wholes, shuffled = [], []
    with pair_table_rows(PAIR_ROWS):
        for seed in seeds:
            wholes.append(data.trained(seed, steps))
            shuffled.append(data.lives(folder / f"shuffled-{seed}", seed, steps, saves, resumes=False))
        resumed = data.lives(folder / "resumed", seeds[0], steps, saves, resumes=True)
    return {
        "samples": len(data.train), "batch": BATCH, "steps": steps, "restarts": len(saves), "saved_at": saves,
        "pair_rows": PAIR_ROWS, "sampler": data.sampler, "held_out": data.held_out_samples,
        "whole": [_summary(each, steps) for each in wholes],
        "shuffled": [_summary(each, steps) for each in shuffled],
        "resumed": _summary(resumed, steps)
        | {
            "losses_equal": resumed["losses"] == wholes[0]["losses"],
            "samples_equal": resumed["samples"] == wholes[0]["samples"],
        },
    }  # fmt: skip


def _summary(run: Found, steps: int) -> Found:
    return {"held_out": run["held_out"], "seed": run["seed"], "restored": run["restored"]} | seen(
        run["samples"], steps * BATCH
    )


def seen(samples: list[list[int]], of: int) -> Found:
    """Return how many samples a pass of `of` samples trained on more than once, and how many it missed."""
    counts = Counter(sample for batch in samples for sample in batch)
    return {
        "trained": counts.total(),
        "twice": sum(times > 1 for times in counts.values()),
        "never": of - len(counts),
    }


class _Data:
    def __init__(self, retail: Any, share: float) -> None:
        import baskets
        import deltashard

        class Recording(baskets.HeldOutItems):
            """Records the samples that are fetched."""

            def __getitems__(self, samples: list[int]) -> Any:
                self.fetched = list(samples)
                return super().__getitems__(samples)

        whole = retail.train
        used = whole.starts[: max(2, round(share * len(whole.starts)))]
        part = baskets.Baskets(items=whole.items[: used[-1]], starts=used)
        self.train = Recording(part, part.items)
        self.retail = retail
        self._held_out = baskets.held_out_batches(retail, batch_size=2048, seed=9)
        if share < 0.1:
            self._held_out = self._held_out[:3]
        self.held_out_samples = sum(len(batch.sizes) for batch in self._held_out)
        self._resumable = getattr(deltashard, "ResumableSampler", None)
        self.sampler = "ResumableSampler" if self._resumable else "DataLoader(shuffle=True)"

    def _loader(self, seed: int) -> Any:
        from torch.utils.data import DataLoader

        options: Found = {"batch_size": BATCH, "drop_last": True, "collate_fn": lambda batch: batch}
        if self._resumable is not None:
            return DataLoader(self.train, sampler=self._resumable(self.train, seed=seed), **options)
        import torch

        return DataLoader(self.train, shuffle=True, generator=torch.Generator().manual_seed(seed), **options)

    def _steps(self, training: DemoTraining, loader: Any, run: Found) -> Iterator[int]:
        for batch in loader:
            run["losses"].append(training.train(batch))
            run["samples"].append(self.train.fetched)
            yield len(run["losses"])

    def trained(self, seed: int, steps: int) -> Found:
        run = _run(seed)
        training = DemoTraining(self.retail, seed)
        for step in self._steps(training, self._loader(seed), run):
            if step == steps:
                break
        return run | {"held_out": self._loss(training)}

    def lives(self, store: Path, seed: int, steps: int, saves: list[int], *, resumes: bool) -> Found:
        """End each life some steps after a save; every life but the first starts with other initial values."""
        run = _run(seed)
        for number, save_at in enumerate([*saves, steps]):
            last = number == len(saves)
            dies_at = None if last else min(save_at + STEPS_AFTER_SAVE, steps - 1)
            try:
                loss = self._life(store, run, steps, number, save_at, dies_at, resumes=resumes)
            except _TrainingKilled:
                continue
            return run | {"held_out": loss}
        raise AssertionError("no life came to the end")

    def _life(
        self, store: Path, run: Found, steps: int, number: int, save_at: int, dies_at: int | None, *, resumes: bool
    ) -> float:  # fmt: skip
        import deltashard

        seed: int = run["seed"]
        training = DemoTraining(self.retail, seed if number == 0 else seed + 1000 * number)
        # Exact rows: the passes differ in the order of the data only.
        ckpt = deltashard.Checkpointer(
            training.model, training.optimizers, url=store, run="order", encoding="fp32", grace_s=None
        )
        loader = self._loader(seed if resumes or number == 0 else seed + 1000 * number)
        try:
            restored = ckpt.restore()
            if restored is not None:
                run["restored"].append(restored.step)
                del run["losses"][restored.step :], run["samples"][restored.step :]
            if resumes:
                loader = ckpt.wrap(loader)
            for step in self._steps(training, loader, run):
                ckpt.step()
                if step == dies_at:
                    raise _TrainingKilled
                if step == save_at and dies_at is not None:
                    ckpt.save().wait(120)
                if step == steps:
                    break
        finally:
            ckpt.__exit__(*sys.exc_info())
        return self._loss(training)

    def _loss(self, training: DemoTraining) -> float:
        return float(
            np.average(training.loss(self._held_out), weights=[len(batch.sizes) for batch in self._held_out])
        )


def _run(seed: int) -> Found:
    return {"seed": seed, "losses": [], "samples": [], "restored": []}


def change(found: Found) -> tuple[float, float | None]:
    """Return the mean relative change of held-out loss by new shuffles, over paired seeds, and its standard error."""
    changes = [
        other["held_out"] / whole["held_out"] - 1
        for whole, other in zip(found["whole"], found["shuffled"], strict=True)
    ]
    return fmean(changes), stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else None


def headlines(found: Found) -> list[Found]:
    resumed = found["resumed"]
    equal = resumed["losses_equal"] and resumed["samples_equal"]
    return [
        {
            "what": f"CheckFreq: one pass with {found['restarts']} restarts trains on every sample once",
            "paper": "yes, by its iterator",
            "ours": f"{resumed['twice']} samples twice, {resumed['never']} never"
            + (", losses bit-identical" if equal else ", other losses"),
            "met": equal and not resumed["twice"] and not resumed["never"],
            "why": "the resumed pass differs from the uninterrupted one",
        }
    ]


def check(found: Found) -> list[str]:
    """Check orders that hold on any machine: a resumed pass equals the uninterrupted one, a shuffled one does not."""
    wrong = []
    resumed = found["resumed"]
    if not resumed["losses_equal"]:
        wrong.append("losses of a resumed pass differ from those of the uninterrupted one")
    if not resumed["samples_equal"]:
        wrong.append("a resumed pass trained on other samples than the uninterrupted one")
    for name, run in [("resumed", resumed), *(("uninterrupted", each) for each in found["whole"])]:
        if run["twice"] or run["never"]:
            wrong.append(f"{name} pass: {run['twice']} samples twice, {run['never']} never")
    for run in [resumed, *found["shuffled"]]:
        if run["restored"] != found["saved_at"]:
            wrong.append(f"restarts restored steps {run['restored']}, saved were {found['saved_at']}")
    wrong += [
        f"seed {run['seed']}: a pass with another shuffle at each restart saw every sample once"
        for run in found["shuffled"]
        if not run["twice"] or not run["never"]
    ]
    return wrong


def page(found: Found) -> str:
    mean, error = change(found)
    rows = [
        _row("uninterrupted", found["whole"][0], found),
        _row("resumed at its position", found["resumed"], found),
        *(_row(f"a new shuffle, seed {run['seed']}", run, found) for run in found["shuffled"]),
    ]
    resumed = found["resumed"]
    equal = resumed["losses_equal"] and resumed["samples_equal"]
    text = (
        f"One pass over {found['samples']:,} samples of the baskets has {found['steps']:,} steps of {found['batch']} "
        f"(order: {found['sampler']}). An exception ends it {STEPS_AFTER_SAVE} steps after each of "
        f"{found['restarts']} saves. Resumed at the loader's position, it {'equals' if equal else '**differs from**'} "
        "the uninterrupted pass: "
        f"{'the same samples and bit-identical losses' if equal else 'other samples or losses'}. With a loader that "
        "starts a new shuffle at each restart, it trains on some samples twice and on others never. Its held-out "
        f"loss then changes by {mean:+.2%}{'' if error is None else f' ± {error:.2%}'} over {len(found['shuffled'])} "
        f"paired seeds ({found['held_out']:,} held-out samples)."
    )
    return "\n\n".join(
        [
            "### The order of the data",
            text,
            table(["", "samples twice", "never", "held-out loss", "change"], rows),
        ]
    )


def _row(name: str, run: Found, found: Found) -> list[str]:
    whole = next(each for each in found["whole"] if each["seed"] == run["seed"])
    return [
        name,
        f"{run['twice']:,}",
        f"{run['never']:,}",
        f"{run['held_out']:.5f}",
        f"{run['held_out'] / whole['held_out'] - 1:+.3%}",
    ]
