"""Finds the sidecar of a run: in the pod (`DELTASHARD_SOCKET`), or as a child process on this machine.

A child runs in its own session, so that Ctrl-C reaches only the trainer. It finishes staged saves when the trainer
dies,
and exits after `linger_s` without a trainer. A hash of URL and run names its runtime directory (arena, socket,
`ready.json`, log) under /dev/shm and its pack cache under the user's cache directory. A restarted trainer thus finds
the
running sidecar of its run, or at least the cache.

A running sidecar is asked to finish and is replaced if it was started with other arguments (another interval, another
encoding) or if environment variables that it reads have changed (corrected credentials). No other trainer can be
attached to it, because a lock excludes a second trainer of the run. Only a salted hash of the environment is stored.

The ranks of a group on one machine share a sidecar: local rank 0 starts it, the others wait for it, and the rank that
closes last stops it. With several torchrun agents on one machine, each agent has its own sidecar.

The child is spawned without a fork, since a trainer has threads of torch and gRPC.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltashard_checkpoint.private_file import open_private, private_dir, write_private
from deltashard_checkpoint.stores.url import local_path

from deltashard.attach import sidecar_log
from deltashard.attach.lock import (
    free_arenas,
    hold_file,
    holds_file,
    is_free,
    release_file,
    trainer_lock,
    trainer_locks,
)
from deltashard.attach.rank import Rank
from deltashard.errors import SidecarGone, SidecarUnavailable, UserError

log = logging.getLogger("deltashard")

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 40.0
CACHE_TOTAL_BYTES = 20 << 30
"""Total size limit of the pack caches of stopped sidecars on this machine; twice the limit of a single one."""
EXIT_USAGE = 2
"""Exit code of a sidecar that rejected its settings; its last log line has what, where and remedy."""
EXIT_ALREADY_RUNNING = 3
"""Exit code of a sidecar whose runtime directory is owned by another sidecar."""
STAGED_DIR = "DELTASHARD_STAGED_DIR"
"""In a pod, names the folder of a volume in which survivors of a lost rank stage their rows."""
_READ_PREFIXES = ("AWS_", "MINIO_", "GOOGLE_", "AZURE_", "DELTASHARD_")
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
_READ_NAMES = ("SSL_CERT_FILE", "HOME", *_PROXIES, *(name.lower() for name in _PROXIES))
_NOT_READ = (
    "DELTASHARD_SOCKET",
    "DELTASHARD_CONTENT_HASH",
    "DELTASHARD_CRASH_AT",
    "DELTASHARD_URL",
    "DELTASHARD_RUN",
    "DELTASHARD_HOLD_S",
)
"""Variables that the sidecar does not read, receives as arguments, or that only tests set."""


class PodLauncher:
    """Finds the sidecar in another container by its socket. That container also has its log."""

    def __init__(self, socket_path: Path) -> None:
        self._socket = socket_path
        self._cancelled = False

    @property
    def location(self) -> Path:
        return self._socket

    def ensure(self) -> Path:
        """Return the socket of a sidecar that accepts connections.

        Raises:
            SidecarGone: No sidecar listens now; a later try may find one.
            SidecarUnavailable, UserError: The sidecar cannot be started.
        """
        if self._cancelled:
            raise SidecarUnavailable("the trainer closes", where=str(self._socket))
        if not accepts_connections(self._socket):
            raise SidecarGone(
                "the sidecar does not listen",
                where=f"DELTASHARD_SOCKET={self._socket}",
                remedy="check the sidecar container's log; outside of a pod unset DELTASHARD_SOCKET",
            )
        return self._socket

    def cancel(self) -> None:
        """Let a running `ensure` of any thread, and every later one, end soon."""
        self._cancelled = True

    def last_log_error(self) -> str:
        """Return the last error in the sidecar's log; empty without one or if the log is not readable."""
        return ""

    def close(self) -> None:
        """Do nothing: the pod owns the sidecar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarOptions:
    """Arguments of a child sidecar; None keeps a setting's default."""

    url: str
    run: str
    flags: Mapping[str, object] = field(default_factory=dict)
    """Settings of the sidecar by name, for example {"every_s": 30, "encoding": "q8"}."""

    def arguments(self, runtime: Path, cache: Path) -> list[str]:
        arguments = ["-m", "deltashard_sidecar.main", "serve", "--url", self.url, "--run", self.run]
        arguments += ["--dir", str(runtime), "--cache-dir", str(cache)]
        for name, value in sorted({"cache_total_bytes": CACHE_TOTAL_BYTES, **self.flags}.items()):
            if value is not None:
                arguments += [_flag(name), str(value)]
        return arguments


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def normal_url(url: str | os.PathLike[str]) -> str:
    """Return the URL of a store; a bare path becomes the `file://` URL of its absolute path."""
    text = os.fspath(url)
    if "://" in text:
        return text.rstrip("/") if not text.endswith(":///") else text
    return local_path(text).as_uri()


def _home(url: str, run: str, node: int) -> str:
    named = f"{url}\0{run}" + (f"\0{node}" if node else "")
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def runtime_dir(url: str, run: str, node: int = 0) -> Path:
    """Return the private in-memory directory for arena and socket of this run on this machine, per torchrun agent."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())  # noqa: S108 - private below
    return base / f"deltashard-{os.getuid()}" / _home(url, run, node)


def cache_dir(url: str, run: str, node: int = 0) -> Path:
    """Return the directory of this run's pack cache on this machine, per torchrun agent."""
    return _cache_base() / "deltashard" / "packs" / _home(url, run, node)


def _cache_base() -> Path:
    with contextlib.suppress(RuntimeError):  # no HOME, and no entry in the password database
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        there = base
        while not os.path.exists(there):  # noqa: PTH110 - also False for paths without permission
            there = there.parent
        if os.access(there, os.W_OK | os.X_OK):
            return base
    return _temporary_base()


def _temporary_base() -> Path:
    return Path(tempfile.gettempdir()) / f"deltashard-{os.getuid()}"


def staged_dir(url: str, run: str, node: int = 0) -> Path:
    """Return the directory in which survivors of a lost rank stage their rows, next to the run's pack cache."""
    return cache_dir(url, run, node).parent.parent / "staged" / _home(url, run, node)


def staged_in_pod(url: str, run: str) -> Path | None:
    """Return the same directory in a pod, in the volume named by `STAGED_DIR`, if it is set."""
    named = os.environ.get(STAGED_DIR)
    return Path(named) / _home(url, run, 0) if named else None


def accepts_connections(path: Path) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True


_exit_codes: dict[int, int] = {}
"""Exit codes of reaped children."""


def _alive(pid: int) -> bool:
    # Reap a child of this process, since a zombie would appear alive.
    with contextlib.suppress(ChildProcessError):
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped == pid:
            _exit_codes[pid] = os.waitstatus_to_exitcode(status)
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "is gone"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


class ChildLauncher:
    """Finds the running sidecar of this run on this machine, or starts a child (local rank 0)."""

    def __init__(self, options: SidecarOptions, rank: Rank | None = None) -> None:
        """`rank` identifies this process in its group; None: no group."""
        self._options = options
        self._rank = rank or Rank()
        self.runtime = runtime_dir(options.url, options.run, self._rank.node)
        self.cache = cache_dir(options.url, options.run, self._rank.node)
        self.staged = staged_dir(options.url, options.run, self._rank.node)
        """Directory in which survivors of a lost rank stage their rows."""
        self._arguments = options.arguments(self.runtime, self.cache)
        self._spawned = 0
        self._log_offset = 0
        """Size of the log when the sidecar was started; earlier lines belong to others."""
        self._cancelled = threading.Event()
        self.pid: int | None = None
        """Process id of the sidecar that this trainer uses, once known."""
        self._make_private()
        self._lock_path = trainer_lock(self.runtime, self._rank.local)
        hold_file(self._lock_path)

    @property
    def location(self) -> Path:
        return self.runtime

    @property
    def log_path(self) -> Path:
        return self.runtime / "sidecar.log"

    @property
    def ready_path(self) -> Path:
        return self.runtime / "ready.json"

    @property
    def socket_path(self) -> Path:
        return self.runtime / "sidecar.sock"

    def _make_private(self) -> None:
        private_dir(self.runtime.parent)
        private_dir(self.runtime)
        if self.cache.is_relative_to(base := _temporary_base()):
            private_dir(base)
        with contextlib.suppress(
            FileExistsError
        ):  # a concurrent clean-up may remove it: the sidecar creates it again
            self.cache.mkdir(mode=0o700, parents=True)

    def ensure(self) -> Path:
        """Like `PodLauncher.ensure`; restarts a dead child and replaces a running one with other settings."""
        self._pause()
        if self.pid is not None and _alive(self.pid) and accepts_connections(self.socket_path):
            return self.socket_path
        if not holds_file(self._lock_path):  # the directory was removed together with the lock file
            log.warning(
                "the runtime directory %s was removed: it is created again, and its sidecar is replaced. Do not "
                "remove it while the trainer runs",
                self.runtime,
            )
            self._make_private()
            hold_file(self._lock_path)
            if self.pid is not None and self._rank.local == 0 and _alive(self.pid):
                self._stop(self.pid)  # it stops by itself, but holds the pack cache until then
        if self._rank.local != 0:
            return self._await_started()
        until = time.monotonic() + START_DEADLINE_S
        while True:
            found = self._running_pid()
            if found is not None:
                if self._settings_match():
                    self.pid = found
                    return self.socket_path
                log.info(
                    "the sidecar of this run (pid %d) was started with other settings or credentials: replacing it",
                    found,
                )
                self._stop(found)
                until = time.monotonic() + START_DEADLINE_S
            self.pid = self._spawn()
            if self._wait_ready(self.pid):
                self._record_settings()
                return self.socket_path
            # Another sidecar owns the directory: it finishes its last save, or was just started by a trainer that died.
            if time.monotonic() >= until:
                raise SidecarUnavailable(
                    f"an older sidecar of this run does not end{self._log_suffix()}",
                    where=str(self.runtime),
                    remedy="end the process that holds the lock of the file LOCK there",
                )
            self._pause(0.05)

    def _await_started(self) -> Path:
        until_s = time.monotonic() + START_DEADLINE_S
        while (found := self._running_pid()) is None:
            if time.monotonic() >= until_s:
                raise SidecarGone(
                    f"local rank 0 has started no sidecar within {START_DEADLINE_S:.0f} s",
                    where=str(self.runtime),
                    remedy="check its log. Without torchrun set LOCAL_RANK: the ranks of a machine count from 0",
                )
            self._pause(0.05)
        self.pid = found
        return self.socket_path

    def cancel(self) -> None:
        self._cancelled.set()

    def _pause(self, seconds: float = 0.0) -> None:
        if self._cancelled.wait(seconds):
            raise SidecarUnavailable("the trainer closes", where=str(self.runtime))

    def _running_pid(self) -> int | None:
        try:
            pid = int(json.loads(self.ready_path.read_text())["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return pid if _alive(pid) and accepts_connections(self.socket_path) else None

    def _settings_match(self) -> bool:
        try:
            recorded = json.loads((self.runtime / "arguments.json").read_text())
            salt, environment = recorded["salt"], recorded["environment"]
            started_with = recorded["arguments"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(started_with == self._arguments and environment == environment_hash(os.environ, salt))

    def _record_settings(self) -> None:
        salt = os.urandom(16).hex()
        facts = {
            "arguments": self._arguments,
            "salt": salt,
            "environment": environment_hash(os.environ, salt),
        }
        write_private(self.runtime / "arguments.json", json.dumps(facts))

    def _spawn(self) -> int:
        environment = dict(os.environ)
        if self._spawned:
            # A test that kills the sidecar at a crash point refers to the first one.
            environment.pop("DELTASHARD_CRASH_AT", None)
        elif freed_bytes := free_arenas(self.runtime.parent, keep=self.runtime):
            log.info("freed %d MiB of memory left by killed sidecars", freed_bytes >> 20)
        environment.pop("DELTASHARD_SOCKET", None)
        self._spawned += 1
        self._log_offset = sidecar_log.size_of(self.log_path)
        out = open_private(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, *self._arguments],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, out, 1),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
            )
        except OSError as error:
            raise SidecarUnavailable(
                f"the sidecar cannot be started: {error.strerror}",
                where=sys.executable,
                remedy="make this interpreter readable and executable for this user",
            ) from error
        finally:
            os.close(out)
        _exit_codes.pop(pid, None)  # of an earlier process with this number
        return pid

    def _wait_ready(self, pid: int) -> bool:
        """Return whether the sidecar is ready; False if another process owns the runtime directory."""
        until = time.monotonic() + START_DEADLINE_S
        while self._running_pid() != pid:
            dead = not _alive(pid)
            code = _exit_codes.pop(pid, None) if dead else None
            if code == EXIT_ALREADY_RUNNING:
                return False
            if code == EXIT_USAGE:
                raise self._usage_error()
            if dead or time.monotonic() >= until:
                # An exit code also predicts the next start; a signal or a slow start does not.
                answered = dead and code is not None and code > 0
                kind = SidecarUnavailable if answered else SidecarGone
                raise kind(
                    f"the sidecar {_describe_exit(code) if dead else f'was not ready within {START_DEADLINE_S:.0f} s'}"
                    + (self._log_suffix() if answered or not dead else ""),
                    where=str(self.runtime),
                )
            self._pause(0.01)
        return True

    def _usage_error(self) -> UserError:
        parts = sidecar_log.parse_error((self._lines() or [""])[-1])
        for name in self._options.flags:
            if (
                parts["what"] == f"unknown argument {_flag(name)!r}"
            ):  # arguments of the Checkpointer are valid
                return UserError(
                    f"the sidecar has no setting {name!r}",
                    where="Checkpointer(sidecar=)",
                    remedy="docs/reference/sidecar-settings.md has their names, without DELTASHARD_",
                )
        return UserError(parts["what"], where=parts["where"], remedy=parts["remedy"])

    def _lines(self) -> list[str]:
        return sidecar_log.lines_after(self.log_path, self._log_offset)

    def last_log_error(self) -> str:
        return sidecar_log.last_log_error(self._lines())

    def _log_suffix(self) -> str:
        words = self.last_log_error()
        return f": {words}" if words else ""

    def _stop(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + STOP_DEADLINE_S
        while _alive(pid):
            if time.monotonic() >= until:
                raise SidecarUnavailable(
                    f"sidecar {pid} does not stop", where=str(self.runtime), remedy=f"kill {pid}"
                )
            self._pause(0.01)

    def close(self) -> None:
        """Ask the sidecar to finish and exit, unless other ranks use it; do not wait for it."""
        if not self._has_other_ranks() and self.pid is not None and self._running_pid() == self.pid:
            self.ready_path.unlink(missing_ok=True)  # prevents new attachments
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        release_file(self._lock_path)

    def _has_other_ranks(self) -> bool:
        """Whether another rank of this machine uses the sidecar. If two close at once, it exits after `linger_s`."""
        with contextlib.suppress(OSError):
            others = [path for path in trainer_locks(self.runtime) if path != self._lock_path]
            return not all(is_free(lock) for lock in others)
        return False


Launcher = PodLauncher | ChildLauncher
"""Finds a sidecar, and restarts it if it is gone."""


def environment_hash(environment: Mapping[str, str], salt: str) -> str:
    """Return a salted hash of the variables that a sidecar reads, to detect changes without storing the values."""
    read = {
        name: value
        for name, value in environment.items()
        if (name.startswith(_READ_PREFIXES) or name in _READ_NAMES) and name not in _NOT_READ
    }
    return hashlib.sha256(f"{salt}\0{json.dumps(read, sort_keys=True)}".encode()).hexdigest()
