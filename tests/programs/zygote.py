"""Runs programs without interruption, and killed and resumed. As a module, it reads specs as JSON lines and writes verdicts.

All processes are forked from this one, which has imported everything and has no threads: sidecars, and the processes of
a program. A verdict is `{"outcome", "reported", "differs", "restored"}`, with one of the outcomes

- exact: the resumed run ends with the bits of the uninterrupted one;
- reported: it differs or fails, and a warning, a note of the restore, an event or an error of deltashard explains it;
- silent, crash, hung: failures of deltashard. `broken`: the program itself is wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from tests.programs.dimension import Spec, with_defaults
from tests.support.sidecar_zygote import child
from tests.support.trainer.verdict import CapturedLog, differing, explanations, reported_lines

PROCESS_TIMEOUT_S = 120
CHANGES = ("batch_size", "longer", "unshuffled", "workers")
"""Restarts with a changed loader."""
SIDECAR = "main", "grpc_server", "sidecar", "arena.arena", "run.run", "telemetry.structured_logging"


def _sidecar(root: Path, spec: Spec) -> int:
    directory = root / "run"
    directory.mkdir(parents=True)
    options: dict[str, object] = {
        "url": f"file://{root}/store", "run": "run", "dir": directory, "cache-dir": root / "cache", "arena-bytes": "32MiB",
        "maintenance-interval-s": -1, "term-deadline-s": 5, "cache-bytes": "256MiB", "encoding": "fp32",
        "differential": spec["differential"],
    }  # fmt: skip
    if spec["save"] in ("every", "each_step"):
        options["every-steps"] = 2 if spec["save"] == "every" else 1
    argv = ["serve", *(argument for name, value in options.items() for argument in (f"--{name}", str(value)))]
    pid = os.fork()
    if pid == 0:
        log = str(root / "sidecar.log")
        child({"argv": argv, "env": dict(os.environ), "cwd": str(root), "log": log, "constants": {}})
    until = time.monotonic() + PROCESS_TIMEOUT_S
    while not (directory / "ready.json").exists():
        if os.waitpid(pid, os.WNOHANG)[0] or time.monotonic() > until:
            raise RuntimeError((root / "sidecar.log").read_text())
        time.sleep(0.01)
    return pid


def _run_process(root: Path, spec: Spec, out: Path, *, kill: int, restarted: bool) -> int | None:
    """Return the exit code of a forked process of the program, or None if the process did not end."""
    pid = os.fork()
    if pid == 0:
        _run_child(root, spec, out, kill=kill, restarted=restarted)
    until = time.monotonic() + PROCESS_TIMEOUT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


def _run_child(root: Path, spec: Spec, out: Path, *, kill: int, restarted: bool) -> None:
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    reported = MessageLog(out.with_suffix(".reported"))
    found: dict[str, Any] = {"error": None, "reported": reported, "bits": None, "restored": 0}
    try:
        from deltashard.errors import DeltashardError

        from tests.programs.program import UserProgram

        os.environ["DELTASHARD_SOCKET"] = str(root / "run" / "sidecar.sock")
        CapturedLog(found["reported"])
        program = None
        try:
            program = UserProgram(spec, kill=kill, restarted=restarted, reported=found["reported"])
            program.run()
            found["bits"] = program.bits()
        except DeltashardError as error:
            traceback.print_exc()
            found["error"] = f"refused: {type(error).__name__}: {error}"
        except Exception as error:
            traceback.print_exc()
            found["error"] = f"crash: {type(error).__name__}: {error}"
        found["restored"] = getattr(program, "restored", 0)
        found["between_epochs"] = getattr(program, "between_epochs", False)
        out.write_bytes(pickle.dumps(found | {"reported": [*reported]}))
    finally:
        os._exit(0)


class MessageLog(list[str]):
    """The messages that a process received, also written to a file in case the process is killed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        path.touch()

    def append(self, message: str) -> None:
        super().append(message)
        with self._path.open("a") as file:
            file.write(json.dumps(message) + "\n")


def _read(out: Path) -> dict[str, Any]:
    if out.exists():
        return pickle.loads(out.read_bytes())
    return {
        "error": f"crash: no result: {out.with_suffix('.log').read_text()[-1500:]}",
        "reported": [json.loads(line) for line in out.with_suffix(".reported").read_text().splitlines()],
        "bits": None,
        "restored": 0,
    }


def evaluate(spec: Spec) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="programs-"))
    sidecars = []
    try:
        for name in ("whole", "killed"):
            sidecars.append(_sidecar(root / name, spec))
        rc = _run_process(root / "whole", spec, root / "whole.out", kill=0, restarted=False)
        whole = _read(root / "whole.out")
        if rc is None:
            return {"outcome": "hung", "reported": ["the uninterrupted run"]}
        if whole["error"]:
            outcome = "reported" if whole["error"].startswith("refused") else "broken"
            return {"outcome": outcome, "reported": [whole["error"]]}
        codes = [_run_process(root / "killed", spec, root / "killed.out", kill=spec["kill"], restarted=False)]
        if spec["second_kill"]:
            second = _run_process(
                root / "killed", spec, root / "second.out", kill=spec["second_kill"], restarted=True
            )
            codes.append(second)
        codes.append(_run_process(root / "killed", spec, root / "resumed.out", kill=0, restarted=True))
        if None in codes:
            return {"outcome": "hung", "reported": [f"process {codes.index(None) + 1} of the killed run"]}
        if codes[0] >= 0:
            return {"outcome": "broken", "reported": [f"not killed: {_read(root / 'killed.out')['error']}"]}
        outs = [root / f"{n}.out" for n in ("killed", "second", "resumed")]
        return _compare(spec, whole, [_read(out) for out in outs if out.with_suffix(".reported").exists()])
    finally:
        for pid in sidecars:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not os.environ.get("DELTASHARD_TEST_KEEP"):
            shutil.rmtree(root, ignore_errors=True)


def _compare(spec: Spec, whole: dict[str, Any], killed: list[dict[str, Any]]) -> dict[str, Any]:
    last = killed[-1]
    texts = [text for each in (whole, *killed) for text in each["reported"]]
    verdict: dict[str, Any] = {"reported": reported_lines(texts), "restored": last["restored"], "differs": []}
    if last["error"]:
        crash = last["error"].startswith("crash")
        return verdict | {
            "outcome": "crash" if crash else "reported",
            "reported": [last["error"], *reported_lines(texts)],
        }
    if last["bits"] == whole["bits"]:
        return verdict | {"outcome": "exact"}
    between = spec["restart"] in CHANGES and any(
        each["restored"] and each.get("between_epochs") for each in killed
    )
    if not explanations(texts) and between:
        return verdict | {"outcome": "another loader between epochs"}
    if spec["restart"] != "same" and not any(each["restored"] for each in killed):
        return verdict | {"outcome": "another program from its beginning"}
    return verdict | {
        "outcome": "reported" if explanations(texts) else "silent",
        "differs": differing(whole["bits"], last["bits"]),
    }


def serve() -> None:
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    for name in ("torch._dynamo", "torch.distributed.tensor", "tests.programs.program"):
        importlib.import_module(name)
    for name in SIDECAR:
        importlib.import_module(f"deltashard_sidecar.{name}")
    for line in sys.stdin:
        print(json.dumps(evaluate(with_defaults(json.loads(line)))), flush=True)


if __name__ == "__main__":
    serve()
