"""A local Job: one torchrun with its ranks on this machine, restarted when it exits with a code other than 0.

torchrun itself restarts all ranks when one ends (`--max-restarts`). A Job controller answers the end of torchrun, or a
resize, with a new start. The ranks themselves start and restart the sidecar.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESTARTS = 3
"""Maximum restarts of the ranks by one torchrun, and of torchrun by the Job."""
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    # A separate store of the process group for each start of the ranks. torchrun's store outlives them and still holds
    # the addresses of the dead ranks: gloo can read those and wait for them until its timeout.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "CUDA_VISIBLE_DEVICES": "",  # the demo does not use them, and partial recovery does not support them
}
END_S = 90.0
"""torchrun kills ranks that do not end 30 s after SIGTERM."""


def start_torchrun(
    world: int, arguments: list[str], log: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the training script on `world` ranks; all output is written to `log`."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(world), "--max-restarts", str(RESTARTS), "--monitor-interval", "0.2"]
    with log.open("ab") as out:
        return subprocess.Popen(
            [*command, str(HERE / "train.py"), *arguments],
            env=os.environ | RANK_ENVIRONMENT | environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


class RankJob:
    """Runs until torchrun ends with 0, or has failed too often; `close` ends whatever still runs."""

    def __init__(self, folder: Path, *, url: str, run: str, arguments: list[str]) -> None:
        """`arguments` are the training script's; `url` and `run` give the location of its checkpoints."""
        self.log = folder / "torchrun.log"
        self.world = 0
        self.finished = threading.Event()
        self.failed = threading.Event()
        self._url_and_run = (url, run)
        self._arguments = arguments
        self._environment = {
            "DELTASHARD_URL": url,
            "DELTASHARD_RUN": run,
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._controller = threading.Thread(target=self._control, name="job controller", daemon=True)

    def start(self, world: int) -> None:
        with self._lock:
            self.world = world
            self._process = start_torchrun(world, self._arguments, self.log, self._environment)
            if not self._controller.is_alive():
                self._controller.start()

    def _control(self) -> None:
        while not self._closing.wait(0.05):
            with self._lock:
                code = self._process.poll() if self._process else None
                if code == 0:
                    self.finished.set()
                    return
                if code is not None:
                    self._failures += 1
                    if self._failures > RESTARTS:
                        self.failed.set()
                        return
                    self.start(self.world)

    def resize(self, world: int, *, graceful: bool, extra_arguments: Sequence[str] = ()) -> float:
        """End all ranks by SIGTERM or SIGKILL, start `world` of them, and return the time at which they had ended.

        `extra_arguments`: more arguments of the training script, from now on.
        """
        with self._lock:  # the controller does not restart them in between
            self._arguments = [*self._arguments, *extra_arguments]
            if graceful:
                self._end()
            else:
                self._kill_all()
            ended_s = time.time()
            self.start(world)
        return ended_s

    def ranks(self) -> dict[int, int]:
        """Return process ids of the live ranks, by rank; empty while torchrun starts them."""
        found: dict[int, int] = {}
        if self._process is None:
            return found
        for pid in _children(self._process.pid):
            rank = _environment(pid).get("RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def kill_rank(self, rank: int) -> float:
        os.kill(self.ranks()[rank], signal.SIGKILL)
        return time.time()

    def sidecar(self) -> int | None:
        """Return the process id of this run's sidecar on this machine, found among all processes."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                words = _words(entry / "cmdline")
                if "deltashard_sidecar.main" in words and all(word in words for word in self._url_and_run):
                    return int(entry.name)
        return None

    def close(self) -> None:
        """End all remaining processes: torchrun, its ranks, and the sidecar, which would otherwise linger."""
        self._closing.set()
        if self._controller.is_alive():
            self._controller.join()
        self._end()
        if (sidecar := self.sidecar()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(sidecar, signal.SIGTERM)
            until = time.monotonic() + END_S
            while self.sidecar() == sidecar and time.monotonic() < until:
                time.sleep(0.05)

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._kill_all()

    def _kill_all(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)  # it starts no more ranks
        for pid in _children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def last_line(self, words: str) -> str:
        """Return the last printed line that contains these words, or an empty string."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if words in line), "")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace").split("\0")
    return []


def _environment(pid: int) -> dict[str, str]:
    pairs = (word.partition("=") for word in _words(Path(f"/proc/{pid}/environ")))
    return {name: value for name, _, value in pairs}
