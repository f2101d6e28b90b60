"""Ranks of one training, as torchrun starts them, forked from one process that has imported everything.

Run as a module this takes lines of JSON, `[ENVIRONMENT, MODULE, WORKDIR, WORLD, SCENARIO, {OPTION: VALUE}, AGENT, SPARE]`,
and answers each with the exit codes of the ranks. Every rank calls the scenario, a function of the module and of
(rank, workdir, **options), and writes its result or its error to `WORKDIR/out/{rank}.json`. Ranks that end
by a signal write nothing. Their output is in `WORKDIR/log-{rank}`.

Importing torch and TorchRec takes longer than most scenarios, so the files that a worker runs share a process, which has
no threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.server.port import free_port
from tests.support.tool import ROOT

HANG_TIMEOUT_S = 120
"""A rank still running after this time prints its stack."""


class RankZygote:
    """The process that ranks are forked from; tests get it as the fixture `rank_zygote`."""

    def __init__(self) -> None:
        self._process = self._start()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if key != "DELTASHARD_CRASH_AT"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.trainer.rank_zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,  # read at import: a scenario that must crash sets it in the rank
        )

    def run(
        self,
        module: str,
        workdir: Path,
        world: int,
        scenario: str,
        *,
        agent: bool = False,
        spare: int | None = None,
        **options: object,
    ) -> list[Any]:
        """Run a scenario of `module`; return each rank's result, None if it was killed. A failed rank fails the test.

        `agent`: like torchrun's agent, kill the other ranks when one was killed. `spare`: a rank on another machine,
        which the agent neither kills nor waits for.
        """
        workdir.mkdir(exist_ok=True)
        texts = {key: str(value) for key, value in options.items()}
        request = [dict(os.environ), module, str(workdir), world, scenario, texts, agent, spare]
        codes = self._request(json.dumps(request))
        (workdir / "codes").write_text(json.dumps(codes))
        if any(code > 0 for code in codes):
            raise AssertionError(f"exit codes {codes}\n\n{_logs(workdir, world)}")
        outs = [workdir / "out" / f"{rank}.json" for rank in range(world)]
        return [json.loads(out.read_text()) if out.exists() else None for out in outs]

    def _request(self, line: str) -> list[int]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
            codes: list[int] = json.loads(stdout.readline())
        except BaseException:  # e.g. a timeout: a late answer would be read as the next scenario's
            self._process.kill()
            self._process.wait()
            stdout.close()
            self._process = self._start()
            raise
        return codes

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _logs(workdir: Path, world: int) -> str:
    """Return the end of each rank's output: a deadlock is visible only in all logs together."""
    logs = [(workdir / f"log-{rank}").read_text()[-8000:] for rank in range(world)]
    return "\n".join(f"---- rank {rank} ----\n{log}" for rank, log in enumerate(logs))


def _serve() -> None:
    """Serve requests as the module docstring describes; return when stdin ends."""
    warnings.simplefilter("ignore")
    # Imports of torch at the first use of DDP and of an optimizer: they take seconds in each rank otherwise.
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.tensor")
    for line in sys.stdin:
        environment, module, workdir, world, scenario, options, agent, spare = json.loads(line)
        os.environ.clear()
        os.environ.update(environment)
        ended = functools.partial(_wait_with_spares, spare=spare) if agent else _ended
        codes = _ranks(
            Path(workdir), world, getattr(importlib.import_module(module), scenario), options, ended
        )
        print(json.dumps(codes), flush=True)


def _ended(children: list[int]) -> list[int]:
    """Return the exit codes of all ranks, once they have ended."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _wait_with_spares(ranks: list[int], *, spare: int | None) -> list[int]:
    """Return the exit codes of all ranks, 0 for `spare`. When one is killed, kill the others and ignore their errors."""
    codes: dict[int, int] = {}
    children = [child for rank, child in enumerate(ranks) if rank != spare]

    def reap(how: int) -> bool:
        ended, status = os.waitpid(-1, how)
        if ended in children:
            codes[ended] = os.waitstatus_to_exitcode(status)
        return ended != 0

    while len(codes) < len(children) and not any(codes.values()):
        reap(0)
    while len(codes) < len(children) and reap(os.WNOHANG):
        pass  # a rank that failed because another was killed, and ended before the kill was noticed
    killed = any(code < 0 for code in codes.values())
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
    while len(codes) < len(children):
        reap(0)
    found = [codes.get(child, 0) for child in ranks]
    return [min(code, 0) for code in found] if killed else found


def _ranks(
    workdir: Path,
    world: int,
    scenario: Any,
    options: dict[str, str],
    ended: Callable[[list[int]], list[int]],
) -> list[int]:
    """Fork `world` ranks; return their exit codes."""
    (workdir / "out").mkdir(parents=True, exist_ok=True)
    for old in (workdir / "out").iterdir():
        old.unlink()
    port = free_port()
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _rank(rank, world, port, scenario, workdir, options)
            finally:
                os._exit(code)
        children.append(child)
    return ended(children)


def _rank(rank: int, world: int, port: int, scenario: Any, workdir: Path, options: dict[str, str]) -> int:
    import torch
    import torch.distributed as dist
    from deltashard.errors import DeltashardError

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    log = os.open(workdir / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(HANG_TIMEOUT_S)
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_TIMEOUT_S))
    result: Any
    try:
        result, code = scenario(rank, workdir, **options), 0
    except DeltashardError as error:
        traceback.print_exc()
        result, code = {"error": type(error).__name__, "what": error.what, "remedy": error.remedy}, 0
    except Exception:
        traceback.print_exc()
        result, code = None, 1
    out = workdir / "out" / f"{rank}.json"
    out.with_suffix(".new").write_text(json.dumps(result))
    out.with_suffix(".new").rename(out)
    # Rank 0 holds the store, so it exits last.
    with contextlib.suppress(Exception):
        dist.barrier()
    return code


if __name__ == "__main__":
    _serve()
