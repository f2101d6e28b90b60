"""The training script in the pods, as a user would write it. It also sends events to the test.

The test receives every step over a TCP connection before deltashard does, so the count of lost steps does not depend
on deltashard.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import deltashard
from event_client import EventClient  # type: ignore[import-not-found]  # next to this script, in the image
from model import RecommenderTraining  # type: ignore[import-not-found]

STEPS = int(os.environ["STEPS"])
PACE_S = float(os.environ.get("PACE_S", "0"))
"""Simulates the accelerator's work of one step."""


def allocate_memory(*_: object) -> None:
    blocks = [b"x" * (256 << 20)]
    while True:
        blocks.append(blocks[0] + b"x")


def main() -> None:
    """Train for STEPS steps, from the last checkpoint."""
    signal.signal(signal.SIGUSR1, allocate_memory)
    events = EventClient()
    training = RecommenderTraining()
    ckpt = deltashard.Checkpointer(training.model, training.optimizers, content_hash=True)
    resumed = ckpt.restore()
    step = resumed.step if resumed else 0
    events.send(
        "began",
        step=step,
        seq=resumed.seq if resumed else None,
        source=resumed.source if resumed else None,
        exact=resumed.verified if resumed else None,
        attempt=ckpt.attempt,
        digest=training.digest() if resumed else None,
        library=deltashard.__file__,
        secrets=Path("/etc/deltashard/store").exists() or any(name.startswith("AWS_") for name in os.environ),
    )
    loader = ckpt.wrap(training.loader)
    with ckpt:
        while step < STEPS:
            for batch in loader:
                training.train(batch)
                step += 1
                events.send("step", step=step)
                try:
                    ckpt.step()
                except deltashard.FencedError as error:
                    events.send("fenced", step=step, why=str(error))
                    raise
                if step == STEPS:
                    break
                time.sleep(PACE_S)
    events.send("finished", step=step, digest=training.digest())


if __name__ == "__main__":
    main()
