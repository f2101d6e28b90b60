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
from pathlib import Path

from deltashard_proto.v1 import trainer_pb2 as pb

log = logging.getLogger(__name__)

KEPT = 4096
"""Newest steps that are kept."""
_RECORD = struct.Struct("<QQd")
"""Step, attempt, loss; step 0: none."""
_HEAD = 32
_MAGIC = b"dsloss01"


class LossBook:
    """The losses of one rank of a run. On the training thread only; what goes wrong here is not training's concern."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._file: mmap.mmap | None = None
        self._first: dict[int, float] = {}
        """Step -> loss of the first time, of steps that are to be trained again."""
        self._n = 0
        self._mean = 0.0
        self._squares = 0.0
        self._sum = 0.0

    def note(
        self, loss: float, *, step: int, attempt: int | None, arena: str | None, run: str, rank: int
    ) -> None:
        """The loss of a step that was just trained under an attempt; `arena`: where the sidecar's directory is."""
        try:
            if attempt != self._attempt:
                self._open(attempt, arena, run, rank, step)
            value = float(loss)
            if self._file is None or not math.isfinite(value):
                return
            self._compare(step, value)
            _RECORD.pack_into(self._file, _HEAD + step % KEPT * _RECORD.size, step, attempt or 0, value)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            log.debug("losses are not kept: %s", error)

    def check(self) -> pb.LossCheck | None:
        """What was found, once every step whose loss is known was trained again; None before, and without any."""
        if not self._n or self._first:
            return None
        variance = self._squares / (self._n - 1) if self._n > 1 else math.inf
        return pb.LossCheck(
            steps=self._n, mean=self._mean, error=math.sqrt(variance / self._n), first=self._sum / self._n
        )

    def close(self) -> None:
        """Let the file go."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, attempt: int | None, arena: str | None, run: str, rank: int, step: int) -> None:
        self.close()
        self._attempt, self._first = attempt, {}
        self._n, self._mean, self._squares, self._sum = 0, 0.0, 0.0, 0.0
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
        for n in range(KEPT):
            then, _, loss = _RECORD.unpack_from(self._file, _HEAD + n * _RECORD.size)
            if then >= step and then % KEPT == n and math.isfinite(loss):
                self._first[then] = loss

    def _compare(self, step: int, loss: float) -> None:
        """One step more that was trained twice; steps that were passed over are not waited for."""
        before = self._first.pop(step, None)
        for then in [each for each in self._first if each < step]:
            del self._first[then]
        if before is None:
            return
        self._n += 1
        delta = loss - before - self._mean
        self._mean += delta / self._n
        self._squares += delta * (loss - before - self._mean)
        self._sum += before
