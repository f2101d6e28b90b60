"""Losses of steps, kept where the death of the trainer cannot take them, and compared when steps are trained again.

A restore from few bits changes the model a little; whether that harms is seen best in the steps between the checkpoint
and the failure: the same data, trained a second time. `step(loss=)` writes each loss into a small file in the sidecar's
directory (of one machine: a trainer that comes back on another finds none, and nothing is compared). The next process
finds there what the steps after its checkpoint cost the first time.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import struct
from collections import deque
from pathlib import Path

from deltashard_checkpoint.deciding.cost import Measure
from deltashard_proto.v1 import trainer_pb2 as pb
from torch import Tensor

log = logging.getLogger(__name__)

KEPT = 4096
"""Newest steps that are kept."""
_RECORD = struct.Struct("<Qd")
"""Step and loss; step 0: none."""
_HEAD = 32
_MAGIC = b"dsloss02"


class LossBook:
    """The losses of one rank of a run. On the training thread only; what goes wrong here is not training's concern."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._file: mmap.mmap | None = None
        self._refused = False
        """Whether it was said that a loss is no number."""
        self._first: deque[tuple[int, float]] = deque()
        """(step, loss of the first time), steps rising, of those that are to be trained again."""
        self._rise = Measure()
        """Of losses, again over the first time."""
        self._sum = 0.0
        """Of the first time's losses that were compared."""

    def note(
        self, loss: object, *, step: int, attempt: int | None, arena: str | None, run: str, rank: int
    ) -> None:
        """The loss of a step that was just trained under an attempt; `arena`: where the sidecar's directory is."""
        try:
            if attempt != self._attempt:
                self._open(attempt, arena, run, rank, step)
            value = self._number(loss)
            if self._file is None or value is None or not math.isfinite(value):
                return
            self._compare(step, value)
            _RECORD.pack_into(self._file, _HEAD + step % KEPT * _RECORD.size, step, value)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            log.debug("losses are not kept: %s", error)

    def check(self) -> pb.LossCheck | None:
        """What was found, once every step whose loss is known was trained again; None before, and without any."""
        rise = self._rise
        if not rise.n or self._first:
            return None
        return pb.LossCheck(steps=rise.n, mean=rise.mean, error=rise.error, first=self._sum / rise.n)

    def _number(self, loss: object) -> float | None:
        try:
            return float(loss.detach() if isinstance(loss, Tensor) else loss)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            if not self._refused:
                self._refused = True
                log.warning(
                    "step(loss=) takes a number or a tensor of one element, not %.80r: losses are not compared",
                    loss,
                )
            return None

    def close(self) -> None:
        """Let the file go."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, attempt: int | None, arena: str | None, run: str, rank: int, step: int) -> None:
        self.close()
        self._attempt, self._first = attempt, deque()
        self._rise, self._sum = Measure(), 0.0
        if arena is None:
            return
        head = (_MAGIC + hashlib.sha256(run.encode()).digest())[:_HEAD]
        path = Path(arena).with_name(f"losses-{rank}")
        with path.open("a+b") as file:  # never truncates: what is there is what it is for
            file.truncate(_HEAD + KEPT * _RECORD.size)
            self._file = mmap.mmap(file.fileno(), 0)
        if self._file[:_HEAD] != head:
            self._file[:] = head + bytes(KEPT * _RECORD.size)
            return
        records = _RECORD.iter_unpack(self._file[_HEAD:])
        self._first.extend(
            sorted(
                (then, loss)
                for n, (then, loss) in enumerate(records)
                if then >= step and then % KEPT == n and math.isfinite(loss)
            )
        )

    def _compare(self, step: int, loss: float) -> None:
        """One step more that was trained twice; steps that were passed over are not waited for."""
        while self._first and self._first[0][0] <= step:
            then, before = self._first.popleft()
            if then == step:
                self._rise = self._rise.sampled(loss - before)
                self._sum += before
