"""Entry points: `serve` (the sidecar), `notify` (the preStop hook), `health` (an exec probe).

A process owns its runtime directory by a POSIX record lock on the file `LOCK`. A second process exits at once with
`EXIT_ALREADY_RUNNING`, and its parent attaches to the first. `serve` writes `ready.json` atomically once it serves.
On SIGTERM or SIGINT no save starts, saves in flight are finished or aborted by `term_deadline_s`, and the exit status
is 0. A second signal ends the wait. SIGUSR1 dumps the stacks of all threads to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import DeltashardError, UserError
from deltashard_checkpoint.private_file import open_private, write_private
from deltashard_checkpoint.process import raise_open_file_limit
from deltashard_checkpoint.vocabulary import TRAINER_PROTOCOL

from deltashard_sidecar import settings

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from deltashard_sidecar.fleet.report_client import ReportClient
    from deltashard_sidecar.sidecar import Sidecar
    from deltashard_sidecar.telemetry.metric import Metrics
    from deltashard_sidecar.telemetry.structured_logging import Logger

EXIT_USAGE = 2
"""Settings or permissions are wrong. A restart does not help."""
EXIT_ALREADY_RUNNING = 3
"""Another sidecar owns this runtime directory."""
EXIT_ENVIRONMENT = 4
"""The environment failed: the runtime directory was removed, or the arena was truncated."""
TICK_S = 0.1
HEALTH_DEADLINE_S = 2.0
NOTIFY_DEADLINE_S = 5.0
STALE_S = 30.0
"""Health fails when the main loop has made no progress for this time."""
LOCK = "LOCK"

USAGE = """usage: deltashard-sidecar serve --url URL --run RUN --dir DIR --cache-dir DIR [--SETTING VALUE ...]
       deltashard-sidecar notify [--reason eviction] [--deadline-s S] [--socket PATH]
       deltashard-sidecar health [--socket PATH]
Settings: docs/reference/sidecar-settings.md; every one is also a variable DELTASHARD_<NAME>.
"""


class StopSignals:
    """SIGTERM and SIGINT: the first stops the process, the second also ends every wait.

    IMPORTANT: Python runs a handler between two bytecodes of the main thread, which may hold any lock at that point,
    including the lock of an `Event` it waits for. `Event.set()` could deadlock; `SimpleQueue.put()` is reentrant.
    """

    def __init__(self) -> None:
        self._received: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waited_for = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._received.put(number)

    def wait(self, timeout_s: float) -> bool:
        try:
            self._received.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self._waited_for += 1
        return True

    def received_twice(self) -> bool:
        """Return whether a second signal arrived, whether or not the first was waited for."""
        return self._waited_for + self._received.qsize() > 1


def lock_directory(directory: Path) -> int | None:
    """Return the descriptor of the directory's lock, or None if another process holds it; raises `NotPrivate`."""
    directory.mkdir(mode=0o770, parents=True, exist_ok=True)
    fd = open_private(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o660)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def holds_lock(directory: Path, fd: int) -> bool:
    """Return whether the directory still contains the lock file of `fd`: it may have been removed and made again."""
    try:
        return os.path.samestat((directory / LOCK).lstat(), os.fstat(fd))
    except OSError:
        return False


def serve(argv: Sequence[str]) -> int:
    """Run the sidecar until a signal arrives, or until `linger_s` has passed without a trainer."""
    os.umask(0o007)
    raise_open_file_limit()
    config = settings.load(argv, os.environ)
    from deltashard_sidecar.telemetry.structured_logging import configure, explain

    log = configure(config.log_level, run=config.run)
    lock = lock_directory(config.dir)
    if lock is None:
        log.error("sidecar.already_running", dir=str(config.dir))
        return EXIT_ALREADY_RUNNING
    crash_point("serve.owned")
    config.ready_path.unlink(missing_ok=True)
    try:
        return _serve(config, log, lock)
    except UserError as error:
        log.error("sidecar.refused", **explain(error))  # noqa: TRY400 - an answer, not a crash
        return EXIT_USAGE
    except DeltashardError as error:
        log.error("sidecar.failed", **explain(error))  # noqa: TRY400 - an answer, not a crash
        return EXIT_ENVIRONMENT
    finally:
        os.close(lock)


def _serve(config: settings.Settings, log: Logger, lock: int) -> int:
    from deltashard_sidecar.arena.arena import ArenaKeeper
    from deltashard_sidecar.grpc_server import start_server
    from deltashard_sidecar.run.run import Run
    from deltashard_sidecar.sidecar import Sidecar
    from deltashard_sidecar.telemetry.metric import Metrics
    from deltashard_sidecar.telemetry.structured_logging import bound

    faulthandler.register(signal.SIGUSR1)
    signals = StopSignals()
    metrics = Metrics()
    _check_kernels(config, log)
    keeper = ArenaKeeper(config.arena_path, blocks=config.blocks, block_bytes=config.block_bytes)
    run = Run(config, metrics=metrics, log=log)
    sidecar = Sidecar(keeper, run)
    scraped = _serve_metrics(config, metrics, log)
    server = start_server(sidecar, config.socket_path)
    facts = {
        "pid": os.getpid(),
        "epoch": keeper.epoch,
        "metrics_port": None if scraped is None else scraped.server_port,
        "protocol": TRAINER_PROTOCOL.most,
    }
    crash_point("serve.before_ready")
    write_private(config.ready_path, json.dumps(facts), 0o660)
    log.info("sidecar.serving", blocks=keeper.ledger.total, block_bytes=keeper.block_bytes, **facts)
    sidecar.maintenance.start()
    reports = _start_reports(sidecar)
    status = 0
    while not signals.wait(TICK_S):
        bound(config.dir / "sidecar.log")
        with contextlib.suppress(FileNotFoundError):
            os.utime(config.socket_path)  # for `health`
        if not holds_lock(config.dir, lock) or not keeper.whole:
            # Trainers cannot reach this process any more, or its arena is unusable: a new sidecar creates both again.
            what = "the runtime directory was removed" if keeper.whole else "the arena was truncated"
            remedy = "do not touch it while a sidecar runs; this one stops, and the next one creates it again"
            log.error("sidecar.directory_lost", what=what, where=str(config.dir), remedy=remedy)
            status = EXIT_ENVIRONMENT
            break
        if not sidecar.tick():
            log.info("sidecar.idle_exit", linger_s=config.linger_s)
            break
    log.info("sidecar.stopping", in_flight=len(sidecar.in_flight_saves.in_flight()))
    sidecar.terminate(stop_now=lambda: signals.received_twice() or not keeper.whole)
    if reports is not None:
        reports.stop()
    mine = holds_lock(config.dir, lock)  # another sidecar may serve in this directory already
    if mine:
        config.ready_path.unlink(missing_ok=True)
    server.stop(0.5).wait()
    if mine:
        config.socket_path.unlink(missing_ok=True)
    if scraped is not None:
        scraped.shutdown()
    run.close()
    keeper.close()
    log.info("sidecar.stopped")
    return status


def _serve_metrics(config: settings.Settings, metrics: Metrics, log: Logger) -> WSGIServer | None:
    """Start the endpoint; returns None if it is off or its port is taken, because saves do not depend on it."""
    if config.metrics_port < 0:
        return None
    try:
        return metrics.serve(config.metrics_host, config.metrics_port)
    except OSError as error:
        where, remedy = f"{config.metrics_host}:{config.metrics_port}", "set another metrics_port"
        log.warning("sidecar.metrics_unavailable", what=str(error), where=where, remedy=remedy)
        return None


def _check_kernels(config: settings.Settings, log: Logger) -> None:
    """Warn about the slow numpy kernels; raises `UserError` in a pod, where limits assume the native kernels."""
    from deltashard_checkpoint.codecs import kernel_choice

    if not kernel_choice.is_slow():
        return
    if config.workload_uid:
        what = "the native kernels were not built, and numpy is too slow for a pod"
        remedy = "use the published image, or install a wheel into your image"
        raise UserError(what, where=kernel_choice.__name__, remedy=remedy)
    log.warning("sidecar.numpy_kernels", remedy=kernel_choice.SLOW_MESSAGE)


def _start_reports(sidecar: Sidecar) -> ReportClient | None:
    if not sidecar.settings.fleet:
        return None
    from deltashard_sidecar.fleet.report import SidecarState
    from deltashard_sidecar.fleet.report_client import ReportClient

    client = ReportClient(SidecarState(sidecar))
    sidecar.metrics.nudged = client.nudge
    client.start()
    return client


def _socket(argv: Sequence[str]) -> tuple[dict[str, str], str]:
    flags = dict(zip(argv[::2], argv[1::2], strict=True)) if len(argv) % 2 == 0 else {"": ""}
    if set(flags) - {"--socket", "--dir", "--reason", "--deadline-s"}:
        what = f"unknown arguments {' '.join(argv)!r}"
        raise settings.SettingError(what, where="command line", remedy=USAGE)
    directory = flags.get("--dir") or os.environ.get("DELTASHARD_DIR") or "."
    path = flags.get("--socket") or os.environ.get("DELTASHARD_SOCKET") or f"{directory}/sidecar.sock"
    return flags, path


def notify(argv: Sequence[str]) -> int:
    """Request a save from every trainer because the pod is going away; returns 0 at once, even without a sidecar."""
    import grpc
    from deltashard_proto.v1 import trainer_pb2 as pb
    from deltashard_proto.v1.trainer_pb2_grpc import TrainerStub

    flags, path = _socket(argv)
    deadline_s = settings.number("term_deadline_s", flags.get("--deadline-s", "0"), where="--deadline-s")
    request = pb.NotifyRequest(reason=flags.get("--reason", "eviction"), deadline_s=deadline_s)
    with grpc.insecure_channel(f"unix:{path}") as channel, contextlib.suppress(grpc.RpcError):
        TrainerStub(channel).Notify(request, timeout=NOTIFY_DEADLINE_S)  # type: ignore[no-untyped-call]  # generated
    return 0


def health(argv: Sequence[str]) -> int:
    """Return 0 if the sidecar's socket accepts connections and its main loop touched the socket within `STALE_S`.

    The kernel accepts connections even for a process that hangs. A gRPC probe would take more than twice as long.
    """
    _, path = _socket(argv)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(HEALTH_DEADLINE_S)
        try:
            probe.connect(path)
            stale_s = time.time() - Path(path).stat().st_mtime
        except OSError:
            return 1
    return 0 if stale_s < STALE_S else 1


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"serve": serve, "notify": notify, "health": health}
    if not arguments or arguments[0] not in commands:
        sys.stderr.write(USAGE)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else EXIT_USAGE
    try:
        status = commands[arguments[0]](arguments[1:])
    except UserError as error:
        sys.stderr.write(f"deltashard-sidecar: {error}\n")
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        remedy = "[deltashard-sidecar] -- pip install 'deltashard[sidecar]'"
        sys.stderr.write(f"deltashard-sidecar: the package {error.name!r} is not installed {remedy}\n")
        return EXIT_USAGE
    if arguments[0] == "serve" and argv is None:
        # Everything is closed. A thread that hangs in a store request must not keep the process alive.
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
