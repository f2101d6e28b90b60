"""The examples of several ranks under torchrun: a rank is killed, torchrun restarts the ranks, and training resumes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store

from tests.support.eventually import EventuallyTimeout, eventually
from tests.support.machine import limit_s
from tests.support.tool import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Start = Callable[..., tuple["subprocess.Popen[bytes]", Path]]
FOREVER, MORE = 10_000_000, 100
"""Numbers of steps: of a run that is always killed before its end, and of its continuation to the end."""


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Start]:
    """Start an example on two ranks for a number of steps into `store`. Return torchrun's process and the output."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        example: str, steps: int = FOREVER, every_s: float = 0.2
    ) -> tuple[subprocess.Popen[bytes], Path]:
        log = tmp_path / f"log-{len(started)}"
        environment = {
            "OMP_NUM_THREADS": "1",
            # After a restart gloo must not find addresses of dead ranks in a leftover store.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "DELTASHARD_URL": f"file://{tmp_path / 'store'}",
            "DELTASHARD_RUN": "run",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += ["--max-restarts", "2", "--monitor-interval", "0.2", f"{ROOT}/examples/{example}/train.py"]
        command += [f"--steps={steps}", "--encoding=fp32", f"--every-s={every_s}"]
        with log.open("wb") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment))
        return started[-1], log

    yield start
    for process in started:
        process.terminate()  # torchrun ends its ranks
        process.wait(60)


def _ranks(torchrun: subprocess.Popen[bytes]) -> list[int]:
    return [
        int(pid) for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    ]


def _steps(root: Path) -> list[int]:
    if not (root / "run" / "log").exists():
        return []
    with open_store(root.as_uri()) as store:
        return [entry.step for entry in RunLog(store, "run").refresh().checkpoints.values()]


def _run_to_end(
    process: subprocess.Popen[bytes], again: Callable[[], tuple[subprocess.Popen[bytes], Path]]
) -> list[Path]:
    """Wait until torchrun succeeds, and restart it after a failure as a Job would. Return the logs of these runs.

    After a restart by torchrun, gloo's own connection setup sometimes fails and waits for its timeout of half an hour
    before any code of deltashard runs.
    """
    logs: list[Path] = []
    for _ in range(3):
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(limit_s(100)) == 0:
                return logs
        process.terminate()
        process.wait(60)
        process, log = again()
        logs.append(log)
    assert process.wait(limit_s(100)) == 0, logs[-1].read_text()
    return logs


def _begun(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"begins at step (\d+)", output)]


def _losses(output: str) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    # torchrun's Python writes line ends separately: the other rank's line may precede it.
    for rank, step, loss in re.findall(r"rank (\d) step (\d+) loss ([-+.e\d]+)", output):
        found.setdefault((rank, step), set()).add(loss)
    return found


def _last(log: Path) -> int:
    return max((int(step) for _, step in _losses(log.read_text())), default=0)


@pytest.mark.parametrize("example", ["ddp", "torchrec"])
def test_restarted_group_resumes_exactly(torchrun: Start, tmp_path: Path, example: str) -> None:
    """Each repeated step has the same losses on both ranks, to the last bit.

    In "ddp" one rank is killed, and torchrun restarts all ranks. With TorchRec's tables over two ranks and a pipeline, all
    ranks are killed and restarted.
    """
    process, log = torchrun(example, every_s=1 if example == "torchrec" else 0.2)

    def ahead() -> bool:
        saved = _steps(tmp_path / "store")
        return len(saved) >= 2 and _last(log) >= max(saved) + 3

    eventually(lambda: ahead() or process.poll() is not None, what="steps after a save", timeout_s=300)
    assert process.poll() is None, log.read_text()
    ranks = _ranks(process)
    if example == "torchrec":
        process.kill()  # first, because torchrun would start other ranks
        process.wait(60)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
    else:
        os.kill(ranks[1], signal.SIGKILL)

        def back() -> bool:
            begun = _begun(log.read_text())
            return len(begun) >= 4 and max(_steps(tmp_path / "store")) > max(begun)

        with contextlib.suppress(EventuallyTimeout):  # gloo, see `_run_to_end`
            eventually(lambda: back() or process.poll() is not None, what="a new commit", timeout_s=30)
        process.terminate()
        process.wait(limit_s(60))
    until = _last(log) + MORE
    logs = [log, *_run_to_end(process, lambda: torchrun(example, until))]
    output = "".join(each.read_text() for each in logs)
    begun = _begun(output)
    assert begun[:2] == [0, 0]
    assert len(begun) >= 4
    assert begun[-1] == begun[-2] > 0
    losses = _losses(output)
    other = {at: each for at, each in losses.items() if len(each) > 1}
    assert not other, f"{other}\n{output[-20000:]}"
    assert {step for _, step in losses} == {str(step) for step in range(1, until + 1)}
    assert max(_steps(tmp_path / "store")) == until
