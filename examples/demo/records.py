"""The harness's view of a run: its step lines and the commit log.

`LogWatcher` polls the log as any reader would, in a separate thread, and records when it first saw each checkpoint.
The harness reads commits from the log only, never from the trainer or the sidecar.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.stores.url import open_store

POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step of one process."""

    at_s: float
    step: int
    loss: float
    stall_s: float
    """Inside `ckpt.step()`."""
    crc: int
    """Checksum of the batch's candidates, which identifies samples and random draws."""
    snapshot: bool
    """Whether this step took a snapshot."""
    process: int
    """0 for the first trainer process, 1 for the one after it, ..."""


class StepLines:
    """All step lines of a folder, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[StepRecord] = []
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[StepRecord]:
        for path in sorted(self.folder.glob("steps-*.jsonl")):
            process = list(self._offsets).index(path) if path in self._offsets else len(self._offsets)
            offset = self._offsets.setdefault(path, 0)
            with path.open("rb") as lines:
                lines.seek(offset)
                data = lines.read()
            whole = data[: data.rfind(b"\n") + 1]  # a killed process can leave half a line
            self._offsets[path] = offset + len(whole)
            for line in whole.splitlines():
                at_s, step, loss, stall_s, crc, snapshot = json.loads(line)
                self.steps.append(
                    StepRecord(
                        at_s=at_s,
                        step=step,
                        loss=loss,
                        stall_s=stall_s,
                        crc=crc,
                        snapshot=snapshot,
                        process=process,
                    )
                )
        return self.steps

    @property
    def last(self) -> int:
        """Return the newest step, 0 before the first."""
        steps = self.read()
        return steps[-1].step if steps else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCheckpoint:
    """A checkpoint of the log, and when the harness first saw it there."""

    at_s: float
    checkpoint: Checkpoint


class LogWatcher:
    """Follows the commit log of a run until `close`."""

    def __init__(self, url: str, run: str) -> None:
        self.store = open_store(url)
        self.log = RunLog(self.store, run)
        self.run = run
        self._seen: dict[int, SeenCheckpoint] = {}
        self._attempts: list[int] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log watch", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._closing.wait(POLL_S):
            with contextlib.suppress(EnvironmentFault):  # the next poll retries
                self.poll()

    def poll(self) -> None:
        with self._lock:
            state = self.log.refresh(deadline_s=10)
            now = time.time()
            for seq, checkpoint in state.checkpoints.items():
                self._seen.setdefault(seq, SeenCheckpoint(at_s=now, checkpoint=checkpoint))
            self._attempts = sorted(state.attempts)

    @property
    def seen(self) -> list[SeenCheckpoint]:
        """Return all checkpoints so far, oldest first, including those retired since."""
        with self._lock:
            return [self._seen[seq] for seq in sorted(self._seen)]

    @property
    def attempts(self) -> list[int]:
        """Return the log positions at which a training process took over."""
        with self._lock:
            return list(self._attempts)

    def newest(self, *, before_seq: int | None = None) -> Checkpoint | None:
        """Return the newest checkpoint in the log, or the newest before a position of it."""
        found = [s.checkpoint for s in self.seen if before_seq is None or s.checkpoint.seq < before_seq]
        return found[-1] if found else None

    def uploading(self) -> tuple[int, int] | None:
        """Return the (attempt, snapshot) whose objects are in the store but which is not in the log, if any."""
        newest = self.newest()
        after = f"{self.run}/data/{newest.attempt:020d}/{newest.snapshot_id:08d}/~" if newest else ""
        for item in self.store.list(f"{self.run}/data/", start_after=after):
            parts = item.key.removeprefix(f"{self.run}/data/").split("/")
            if parts[0].isdigit():
                return int(parts[0]), int(parts[1])
        return None

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.poll()
        self.store.close()
