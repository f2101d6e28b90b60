"""A process that saves one cut after another until a crash point kills it; prints what it knows to be committed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.sample import Model, Run, schema, whole


def model_at(step: int) -> Model:
    """The values of a step, the same in every process."""
    model = Model(schema(rows=600), seed=5)
    for _ in range(step):
        model.train()
    return model


def main(directory: str, first: int, saves: int) -> None:
    """Steps first, first + 1, ...: a baseline, then deltas."""
    run = Run(Path(directory) / f"local-{first}", store=open_store(f"file://{directory}/store"))
    model, covers = model_at(first), None
    changed = np.arange(600)
    for step in range(first, first + saves):
        frames = model.frames(changed, step=step, per_frame=25)
        covers = run.save(
            [model.table], [([whole(model.table)], frames)], step=step, covers=covers, blobs={"rng": bytes([step]) * 5000},
            pack_bytes=10_000,
        )  # fmt: skip
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        changed = model.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
