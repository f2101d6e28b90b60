"""The training script in the pods, as a user would write it, plus a witness.

The witness is a TCP connection to the test, which receives every step before deltashard does. So the count of lost
steps does not depend on deltashard.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import deltashard
from model import RecommenderTraining  # type: ignore[import-not-found]  # beside this script, in the image
from witness import WitnessClient  # type: ignore[import-not-found]

STEPS = int(os.environ["STEPS"])
PACE_S = float(os.environ.get("PACE_S", "0"))
"""Simulates the accelerator's work of one step."""


def eat(*_: object) -> None:
    eaten = [b"x" * (256 << 20)]
    while True:
        eaten.append(eaten[0] + b"x")


def main() -> None:
    """Train for STEPS steps, from the last checkpoint."""
    signal.signal(signal.SIGUSR1, eat)
    witness = WitnessClient()
    training = RecommenderTraining()
    ckpt = deltashard.Checkpointer(training.model, training.optimizers, content_hash=True)
    resumed = ckpt.restore()
    step = resumed.step if resumed else 0
    witness.send(
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
                witness.send("step", step=step)
                try:
                    ckpt.step()
                except deltashard.FencedError as error:
                    witness.send("fenced", step=step, why=str(error))
                    raise
                if step == STEPS:
                    break
                time.sleep(PACE_S)
    witness.send("finished", step=step, digest=training.digest())


if __name__ == "__main__":
    main()
