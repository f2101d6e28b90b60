"""Settings: one frozen dataclass, read from `DELTASHARD_*` variables and overridden by the command line.

The field `every_s` has the variable `DELTASHARD_EVERY_S` and the flag `--every-s`. Fields filled by the downward API
have Kubernetes' usual variable names (`POD_NAME`). The docstring under each field is its reference entry, from which
`make reference` generates docs/reference/sidecar-settings.md. Sizes are bytes, or take a suffix (`KiB MiB GiB`).
All validation happens here; the rest of the sidecar trusts the values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from deltashard_checkpoint.cache.pack_spool import MAX_PACK_BYTES
from deltashard_checkpoint.deciding.goal import goal as goal_of
from deltashard_checkpoint.deciding.precision import parse_encodings
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.object_key import validate_run
from deltashard_checkpoint.vocabulary import (
    CHOICES,
    DEFAULT_DIFFERENTIAL,
    DEFAULT_ENCODING,
    DEFAULT_STATE_ENCODING,
    ONE_RUN,
    RUN_PER_POD,
)
from deltashard_proto.arena_layout import DEFAULT_BLOCK_BYTES, MAX_FRAME_BYTES

_PLAIN_VARIABLES = frozenset({"pod_name", "pod_namespace", "pod_uid", "node_name"})
_SUFFIXES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_YEAR_S = 366 * 86400.0
_MAX_EXACT_INT = 1 << 53
"""Larger integers are not exact in every language that reads the log."""
SETTING_CHOICES: Mapping[str, Sequence[str]] = {
    **CHOICES,
    "runs": ("", ONE_RUN, RUN_PER_POD),
    "log_level": ("debug", "info", "warning", "error"),
}
"""Allowed values of each setting that takes one of a few."""


class SettingError(UserError):
    """A variable or flag is unknown, missing or malformed."""


def _ranged(default: float, least: float, most: float) -> Any:
    """Return a field for a number in [least, most]; values outside are rejected at start."""
    return field(default=default, metadata={"range": (least, most)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a sidecar."""

    url: str
    """Object store of the run: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///dir`."""
    run: str
    """Name of the run, the logical training job. With the store, it identifies all stored data."""
    dir: Path
    """Runtime directory: arena, socket, lock and ready.json. In a pod: the memory volume shared with the trainer."""
    cache_dir: Path
    """Directory for spooled packs and the local cache of encoded frames. Use a disk, not the memory volume."""
    socket: Path | None = None
    """Unix socket to serve on. Default: `sidecar.sock` in the runtime directory."""
    owner: str = ""
    """Workload identity recorded in the run's first entry. Another owner is rejected unless it requests a takeover."""
    arena_bytes: int = _ranged(256 << 20, 4 * DEFAULT_BLOCK_BYTES, 1 << 44)
    """Shared memory for saves and restores, allocated in full at start."""
    block_bytes: int = _ranged(DEFAULT_BLOCK_BYTES, MAX_FRAME_BYTES, 1 << 30)
    """Size of one arena block; at least the largest frame (8 MiB)."""
    cache_bytes: int = _ranged(10 << 30, 32 << 20, 1 << 50)
    """Budget of the local cache, including packs that wait for upload."""
    cache_total_bytes: int = _ranged(0, 0, 1 << 50)
    """Total budget of this cache and the caches of other runs next to it, evicted by least recent use; 0 is off."""
    every_s: float = _ranged(0.0, 0, _YEAR_S)
    """Save interval in seconds; 0 is off."""
    every_steps: int = _ranged(0, 0, _MAX_EXACT_INT)
    """Save interval in steps; 0 is off."""
    goal: str = ""
    """Goal of the chosen save interval: auto, overhead=1%, lost-work=5m, pls=0.02. Empty or fixed: use `every_s`
    and `every_steps`. Until saves have been measured, the interval is `every_s`, or one minute."""
    min_interval_s: float = _ranged(0.0, 0, _YEAR_S)
    """Shortest interval that may be chosen, in seconds; 0: no lower bound."""
    max_interval_s: float = _ranged(0.0, 0, _YEAR_S)
    """Longest interval that may be chosen, in seconds; 0: no upper bound."""
    profile_key: str = ""
    """Identifies image and limits. Recorded save costs are reused only with the same key on the same machine."""
    bits_goal: str = ""
    """How the bits of weights are chosen per table: budget or check-n-run. Empty or fixed: use `encoding`."""
    min_bits: int = _ranged(0, 0, 8)
    """Fewest bits that may be chosen for a table; 0: no lower bound."""
    tables: str = ""
    """Encodings of single tables, which override `encoding` and chosen bits: `emb.user=q8,emb.item=q4`."""
    encoding: str = DEFAULT_ENCODING
    """Encoding of embedding weights: {choices}."""
    state_encoding: str = DEFAULT_STATE_ENCODING
    """Encoding of point-wise optimizer state: {choices}. Row-wise state is always stored exactly."""
    differential: str = DEFAULT_DIFFERENTIAL
    """Which rows a save contains: {choices}."""
    pack_bytes: int = _ranged(64 << 20, MAX_FRAME_BYTES, MAX_PACK_BYTES)
    """A pack object is closed at this size."""
    stall_budget_s: float = _ranged(30.0, 0, _YEAR_S)
    """Longest time that a save may block the trainer before it is aborted; after two aborts the next has no limit."""
    stream_idle_s: float = _ranged(120.0, 1, _YEAR_S)
    """A save or restore without a message from its trainer for this time is cancelled."""
    save_deadline_s: float = _ranged(1800.0, 1, _YEAR_S)
    """Longest time from staged to committed. After it the save fails, and the next save covers its rows."""
    attach_deadline_s: float = _ranged(60.0, 0, _YEAR_S)
    """How long Attach waits for a save in flight of this rank's previous trainer before aborting it."""
    open_deadline_s: float = _ranged(300.0, 1, _YEAR_S)
    """How long Open waits for the store and for another pod's closing save."""
    restore_deadline_s: float = _ranged(600.0, 1, _YEAR_S)
    """How long a restore retries an unreachable store before it fails as unavailable."""
    term_deadline_s: float = _ranged(25.0, 0, _YEAR_S)
    """After SIGTERM, saves in flight are finished within this time or aborted."""
    keep_last: int = _ranged(3, 1, _MAX_EXACT_INT)
    """Number of newest checkpoints to retain, with every checkpoint they build on."""
    gc_grace_s: float = _ranged(3600.0, 0, _YEAR_S)
    """Retired objects are deleted after this time, measured by the store's clock."""
    maintenance_interval_s: float = _ranged(60.0, -_YEAR_S, _YEAR_S)
    """Shortest time between rounds of retention, gc and compaction; 0: after every commit; negative: off."""
    compact_after: int = _ranged(16, 0, _MAX_EXACT_INT)
    """A chain with more consecutive differentials than this is compacted into one part; 0 is off."""
    synthetic_baselines: bool = True
    """With one rank, make the baseline by compaction where that costs training less than saving all rows."""
    metrics_port: int = _ranged(-1, -1, 65535)
    """Port of the Prometheus endpoint; 0 picks a free port (recorded in ready.json), -1 is off."""
    metrics_host: str = "127.0.0.1"
    """Address that the Prometheus endpoint binds. In a pod: `::`, all IPv4 and IPv6 addresses."""
    linger_s: float = _ranged(-1.0, -1, _YEAR_S)
    """Exit after this time without a trainer and without a save in flight (plus 30 s at start); -1: never (pods)."""
    log_level: str = "info"
    """Log level: debug, info, warning or error."""
    fleet: str = ""
    """`host:port` of the controller's fleet service; empty: no controller. Saves and restores never wait for it."""
    fleet_token_file: Path | None = None
    """File with the token for the fleet service, a projected service account token. Read for each report."""
    fleet_ca: str = ""
    """PEM of the certificate authority of the fleet service."""
    pod_name: str = ""
    """Name of the pod."""
    pod_namespace: str = ""
    """Namespace of the pod."""
    pod_uid: str = ""
    """UID of the pod."""
    node_name: str = ""
    """Name of the pod's node."""
    workload_kind: str = ""
    """Kind of the workload the pod belongs to: Job, JobSet, StatefulSet, PyTorchJob, ..."""
    workload_name: str = ""
    """Name of the workload."""
    workload_uid: str = ""
    """UID of the workload, the same for all its pods and restarts. Only in pods; Open waits for credentials there."""
    index: str = ""
    """Completion index or ordinal of the pod."""
    replica: str = ""
    """Job of a JobSet, or role in a PyTorchJob (master, worker). Precedes the index."""
    pods: int = _ranged(0, 0, _MAX_EXACT_INT)
    """Number of numbered pods of the workload; 0: unknown, or the pods have no numbers."""
    runs: str = ""
    """one: the workload's pods are ranks of one run. per-pod: each numbered pod trains a separate run, `{run}-{index}`.
    Empty: as one, except that a single-rank trainer in one of several numbered pods is rejected."""
    policy: str = ""
    """Name of the CheckpointPolicy that the pod was injected with."""
    restore_from: str = ""
    """`RUN` or `RUN@PIN`: a run without a log starts as a copy of this checkpoint of another run in the same store.
    Without a pin: its newest checkpoint."""

    def __post_init__(self) -> None:
        validate_run(self.run)
        if self.restore_from:
            validate_run(self.restore_from.partition("@")[0])
        for name in self.__slots__:
            check(name, getattr(self, name), where=f"{flag_of(name)} or {variable_of(name)}")
        if 0 < self.max_interval_s < self.min_interval_s:
            what = f"no interval is at least {self.min_interval_s:g} s and at most {self.max_interval_s:g} s"
            remedy = "min_interval_s is the shortest interval that may be chosen, max_interval_s the longest"
            raise SettingError(what, where="min_interval_s, max_interval_s", remedy=remedy)
        if self.block_bytes % 4096:
            what = f"block_bytes is {self.block_bytes}"
            raise SettingError(what, where="block_bytes", remedy="a multiple of 4096")
        if self.arena_bytes < 4 * self.block_bytes:
            what = f"an arena of {self.arena_bytes} bytes is too small"
            remedy = f"at least 4 blocks of {self.block_bytes} bytes for each trainer of the pod"
            raise SettingError(what, where="arena_bytes", remedy=remedy)

    @property
    def socket_path(self) -> Path:
        return self.socket or self.dir / "sidecar.sock"

    @property
    def arena_path(self) -> Path:
        return self.dir / "arena"

    @property
    def ready_path(self) -> Path:
        """File that is written atomically once the sidecar serves."""
        return self.dir / "ready.json"

    @property
    def grace_s(self) -> float:
        """Time in seconds that a trainer of this pod may save after SIGTERM; 0 outside of pods."""
        return self.term_deadline_s if self.linger_s < 0 else 0.0

    @property
    def blocks(self) -> int:
        return self.arena_bytes // self.block_bytes

    @property
    def threads(self) -> int:
        return min(4, os.cpu_count() or 1)


RANGES: Mapping[str, tuple[float, float]] = {
    each.name: each.metadata["range"] for each in fields(Settings) if each.metadata
}


def check(name: str, value: Any, *, where: str) -> None:
    """Raise `SettingError` unless `value`, already of the setting's type, is an allowed value or within its range."""
    if name in SETTING_CHOICES and value not in SETTING_CHOICES[name]:
        what = f"{name} is {value[:40]!r}"
        raise SettingError(what, where=where, remedy=f"one of {', '.join(SETTING_CHOICES[name])}")
    least, most = RANGES.get(name, (None, None))
    if least is not None and most is not None and not least <= value <= most:  # nor is NaN
        remedy = f"from {int(least)} to {int(most)}; see the settings reference"
        raise SettingError(f"{name} is {value}", where=where, remedy=remedy)
    if name == "goal" and value:
        goal_of(value, where=where)
    if name == "tables":
        parse_encodings(value, where=where)


def number(name: str, text: str, *, where: str) -> float:
    """Parse a command's flag as a float in the range of setting `name`; raises `SettingError`."""
    value = _parse(where, "float", text)
    assert isinstance(value, float)
    check(name, value, where=where)
    return value


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    return name.upper() if name in _PLAIN_VARIABLES else f"DELTASHARD_{name.upper()}"


def _parse(name: str, kind: str, text: str) -> object:
    try:
        match kind:
            case "bool":
                return _BOOLS[text.lower()]
            case "int" if text[-3:] in _SUFFIXES:
                return int(float(text[:-3]) * _SUFFIXES[text[-3:]])
            case "int":
                return int(text)
            case "float":
                return float(text)
    except (ValueError, KeyError, OverflowError):
        remedy = f"see {name} in the settings reference"
        raise SettingError(f"{text!r} is not a valid {kind}", where=name, remedy=remedy) from None
    return Path(text) if "Path" in kind else text


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings from the environment, overridden by arguments; raises `SettingError`."""
    known = {f.name: str(f.type) for f in fields(Settings)}
    values = {
        name: _parse(variable_of(name), kind, text)
        for name, kind in known.items()
        if (text := environ.get(variable_of(name)))
    }
    rest = list(argv)
    while rest:
        flag, has_value, text = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in known:
            raise SettingError(f"unknown argument {flag!r}", where="command line", remedy="see --help")
        if not has_value and not rest:
            raise SettingError(f"{flag} needs a value", where="command line")
        values[name] = _parse(flag, known[name], text if has_value else rest.pop(0))
    if missing := [f.name for f in fields(Settings) if f.default is MISSING and f.name not in values]:
        names = ", ".join(f"{flag_of(name)} ({variable_of(name)})" for name in missing)
        raise SettingError(f"missing: {names}", where="settings")
    return Settings(**values)  # type: ignore[arg-type]  # _parse follows the annotations
