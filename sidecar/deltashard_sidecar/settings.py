"""Settings: one frozen dataclass, filled from `DELTASHARD_*` variables and overridden by the command line.

A field `every_s` is the variable `DELTASHARD_EVERY_S` and the flag `--every-s`; what the downward API says of the pod
has the names that Kubernetes' own examples use (`POD_NAME`). The docstring under each field is its reference entry:
tools/settings_page.py renders docs/reference/sidecar-settings.md from this file. Sizes take plain bytes or a suffix
(`KiB MiB GiB`). Everything is checked here, once; the rest of the sidecar trusts it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from deltashard_checkpoint.cache.pack_spool import MAX_PACK_BYTES
from deltashard_checkpoint.deciding.goal import goal as goal_of
from deltashard_checkpoint.deciding.precision import encodings_of
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
_YEAR_S = 366 * 86400.0
_EXACT = 1 << 53
"""Steps beyond this are no exact numbers in every language that reads the log."""
RANGES: Mapping[str, tuple[float, float]] = {
    "arena_bytes": (4 * DEFAULT_BLOCK_BYTES, 1 << 44),
    "block_bytes": (MAX_FRAME_BYTES, 1 << 30),
    "cache_bytes": (32 << 20, 1 << 50),
    "cache_total_bytes": (0, 1 << 50),
    "every_s": (0, _YEAR_S),
    "every_steps": (0, _EXACT),
    "least_s": (0, _YEAR_S),
    "most_s": (0, _YEAR_S),
    "least_bits": (0, 8),
    "encode_threads": (0, 1024),
    "upload_concurrency": (1, 256),
    "pack_bytes": (MAX_FRAME_BYTES, MAX_PACK_BYTES),
    "stall_budget_s": (0, _YEAR_S),
    "stream_idle_s": (1, _YEAR_S),
    "save_deadline_s": (1, _YEAR_S),
    "attach_deadline_s": (0, _YEAR_S),
    "open_deadline_s": (1, _YEAR_S),
    "restore_deadline_s": (1, _YEAR_S),
    "term_deadline_s": (0, _YEAR_S),
    "keep_last": (1, _EXACT),
    "keep_every_steps": (0, _EXACT),
    "gc_grace_s": (0, _YEAR_S),
    "housekeeping_s": (-_YEAR_S, _YEAR_S),
    "compact_after": (0, _EXACT),
    "restore_goal_s": (0, _YEAR_S),
    "metrics_port": (-1, 65535),
    "pods": (0, _EXACT),
    "linger_s": (-1, _YEAR_S),
}
"""Every number's least and greatest value: what is outside is refused at start, instead of failing later."""
WORDS: Mapping[str, Sequence[str]] = {
    **CHOICES,
    "runs": ("", ONE_RUN, RUN_PER_POD),
    "log_level": ("debug", "info", "warning", "error"),
}
"""The words of a setting that takes one of a few."""


class SettingError(UserError):
    """A variable or flag is unknown, missing or malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set on a sidecar."""

    url: str
    """Object store of the run: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///dir`."""
    run: str
    """Name of the run, the logical training job; with the store it names everything that is stored."""
    dir: Path
    """Runtime directory: arena, socket, lock and ready.json. In a pod the memory volume shared with the trainer."""
    cache_dir: Path
    """Directory for spooled packs and the local cache of encoded frames. A disk, not the memory volume."""
    socket: Path | None = None
    """Unix socket to serve on; default `sidecar.sock` in the runtime directory."""
    owner: str = ""
    """Workload identity written to the run's first entry; another owner is refused unless it says takeover."""
    arena_bytes: int = 256 << 20
    """Shared memory for cuts and restores, allocated in full at start."""
    block_bytes: int = DEFAULT_BLOCK_BYTES
    """Size of one block of the arena; at least the largest frame (8 MiB)."""
    cache_bytes: int = 10 << 30
    """Budget of the local cache, packs that wait for the store included."""
    cache_total_bytes: int = 0
    """Budget of this cache and other runs' beside it, of which the least recently used go; 0: they are left alone."""
    every_s: float = 0.0
    """Save every so many seconds; 0 is off."""
    every_steps: int = 0
    """Save every so many steps; 0 is off."""
    goal: str = ""
    """What the interval is chosen for: auto, overhead=1%, lost-work=5m, pls=0.02; nothing or fixed: as
    `every_s` and `every_steps` say. A chosen interval begins at `every_s`, or a minute, until saves were measured."""
    least_s: float = 0.0
    """Shortest interval that may be chosen, in seconds; 0: no bound of the user's."""
    most_s: float = 0.0
    """Longest interval that may be chosen, in seconds; 0: no bound of the user's."""
    profile_key: str = ""
    """Names image and limits: what saves cost is remembered from commit to commit, and counts where this, the node's
    processors, the world size and the version are the same."""
    bits_goal: str = ""
    """How bits of weights are chosen, by table: budget or check-n-run; nothing or fixed: as `encoding` says."""
    least_bits: int = 0
    """Bits that no table is stored below when they are chosen; 0: no bound of the user's."""
    tables: str = ""
    """Encodings of single tables, before all else: `emb.user=q8,emb.item=q4`."""
    encoding: str = DEFAULT_ENCODING
    """Encoding of embedding weights: {choices}."""
    state_encoding: str = DEFAULT_STATE_ENCODING
    """Encoding of point-wise optimizer state: {choices}. Row-wise state is always exact."""
    differential: str = DEFAULT_DIFFERENTIAL
    """Which rows a save holds: {choices}."""
    encode_threads: int = 0
    """Threads that encode; 0 is one per core, at most 4."""
    upload_concurrency: int = 4
    """Packs uploaded at once."""
    pack_bytes: int = 64 << 20
    """A pack object is closed at this size."""
    stall_budget_s: float = 30.0
    """Longest time a cut may hold the trainer, which then aborts it; after two such aborts the next waits it out."""
    stream_idle_s: float = 120.0
    """A save or restore whose trainer says nothing for so long is ended."""
    save_deadline_s: float = 1800.0
    """From staged to committed; beyond it the save fails and the next one covers its rows."""
    attach_deadline_s: float = 60.0
    """How long Attach waits for the save an earlier trainer of this rank left behind, before it aborts that save."""
    open_deadline_s: float = 300.0
    """How long Open waits for the store and for another pod's closing save."""
    restore_deadline_s: float = 600.0
    """How long a restore retries an unreachable store before it fails as unavailable."""
    term_deadline_s: float = 25.0
    """After SIGTERM: a save in flight is finished within this time or aborted."""
    keep_last: int = 3
    """Retention: the newest so many checkpoints are kept (with all that they cover)."""
    keep_every_steps: int = 0
    """Retention: besides, one checkpoint of every so many steps is kept; 0 is off."""
    gc_grace_s: float = 3600.0
    """Retired objects are deleted after this time, by the store's clock."""
    housekeeping_s: float = 60.0
    """Shortest time between rounds of retention, gc and compaction; 0: one after every commit; negative: off."""
    compact_after: int = 16
    """A chain of consecutive deltas longer than this is compacted into one part; 0 is off."""
    restore_goal_s: float = 0.0
    """A chain that is expected to take longer to restore than this is compacted (one rank); 0: no goal."""
    synthetic_baselines: bool = True
    """At one rank, where it costs training less than a cut of all rows, the baseline is made by compaction."""
    prefetch: bool = True
    """At start, bring the newest checkpoint's frames (of one rank) into the local cache before a trainer asks."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 picks a free one (see ready.json), -1 is off."""
    metrics_host: str = "127.0.0.1"
    """Address the Prometheus endpoint binds; in a pod `::`, every one of both families."""
    linger_s: float = -1.0
    """Exit when no trainer has been attached and no save in flight for so long, after the start for 30 s more; -1 never
    exits (pods)."""
    log_level: str = "info"
    """debug, info, warning or error."""
    fleet: str = ""
    """`host:port` of the controller's fleet service; empty: none. Saves and restores never wait for it."""
    fleet_token_file: Path | None = None
    """Token to authenticate with there, a projected service account token; read for each report."""
    fleet_ca: str = ""
    """PEM of the authority that vouches for the fleet service."""
    pod_name: str = ""
    """The pod's name, for the controller."""
    pod_namespace: str = ""
    """The pod's namespace."""
    pod_uid: str = ""
    """The pod's UID."""
    node_name: str = ""
    """The node it runs on."""
    workload_kind: str = ""
    """Kind of the workload the pod belongs to: Job, JobSet, StatefulSet, PyTorchJob, ..."""
    workload_name: str = ""
    """Its name."""
    workload_uid: str = ""
    """Its UID, the same for all its pods and restarts. Set in pods only; Open waits for credentials there."""
    index: str = ""
    """The pod's completion index or ordinal."""
    replica: str = ""
    """Which Job of a JobSet, which part of a PyTorchJob (master, worker); goes before the index."""
    pods: int = 0
    """Numbered pods that the workload was made with; 0: not known, or without numbers."""
    runs: str = ""
    """one: the workload's pods are ranks of one run; per-pod: each numbered pod trains a run of its own,
    `{run}-{index}`; nothing: of one run, and a trainer that is alone in one of several numbered pods is refused."""
    policy: str = ""
    """Name of the CheckpointPolicy the pod was injected with."""
    restore_from: str = ""
    """`RUN` or `RUN@PIN`: a run that has no log yet begins with a copy of this checkpoint, without a pin the newest, of
    another run of the store. One that has a log goes on with that."""

    def __post_init__(self) -> None:
        validate_run(self.run)
        if self.restore_from:
            validate_run(self.restore_from.partition("@")[0])
        for field in fields(self):
            where = f"{flag_of(field.name)} or {variable_of(field.name)}"
            check(field.name, getattr(self, field.name), where=where)
        if 0 < self.most_s < self.least_s:
            raise SettingError(
                f"no interval is at least {self.least_s:g} s and at most {self.most_s:g} s",
                where="least_s, most_s",
                remedy="least_s is the shortest interval that may be chosen, most_s the longest",
            )
        if self.block_bytes % 4096:
            raise SettingError(
                f"block_bytes is {self.block_bytes}", where="block_bytes", remedy="a multiple of 4096"
            )
        if self.arena_bytes < 4 * self.block_bytes:
            raise SettingError(
                f"an arena of {self.arena_bytes} bytes is too small",
                where="arena_bytes",
                remedy=f"at least 4 blocks of {self.block_bytes} bytes for each trainer of the pod",
            )

    @property
    def socket_path(self) -> Path:
        return self.socket if self.socket is not None else self.dir / "sidecar.sock"

    @property
    def arena_path(self) -> Path:
        return self.dir / "arena"

    @property
    def ready_path(self) -> Path:
        """Written, atomically, once the sidecar serves."""
        return self.dir / "ready.json"

    @property
    def grace_s(self) -> float:
        """How long a trainer of this pod may save after SIGTERM; 0: no pod, for a trainer started this sidecar."""
        return self.term_deadline_s if self.linger_s < 0 else 0.0

    @property
    def blocks(self) -> int:
        return self.arena_bytes // self.block_bytes

    @property
    def threads(self) -> int:
        return self.encode_threads or min(4, os.cpu_count() or 1)


def check(name: str, value: Any, *, where: str) -> None:
    """Raises a `UserError` unless `value`, of the setting's type, is one of its words or within its range."""
    if name in WORDS and value not in WORDS[name]:
        raise SettingError(
            f"{name} is {value[:40]!r}", where=where, remedy=f"one of {', '.join(WORDS[name])}"
        )
    if name in RANGES:
        least, most = RANGES[name]
        if not least <= value <= most:  # nor is NaN
            raise SettingError(
                f"{name} is {value}",
                where=where,
                remedy=f"from {int(least)} to {int(most)}; see the settings reference",
            )
    if name == "goal" and value:
        goal_of(value, where=where)
    if name == "tables":
        encodings_of(value, where=where)


def number(name: str, text: str, *, where: str) -> float:
    """A float with the range of setting `name`, from a command's flag; raises `SettingError`."""
    value = _parse(where, "float", text)
    assert isinstance(value, float)
    check(name, value, where=where)
    return value


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    return name.upper() if name in _PLAIN_VARIABLES else f"DELTASHARD_{name.upper()}"


def _parse(name: str, kind: str, text: str) -> object:
    """One value from its text; `kind` is the field's annotation."""
    try:
        if kind == "bool":
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        if kind == "int":
            for suffix, factor in _SUFFIXES.items():
                if text.endswith(suffix):
                    return int(float(text[: -len(suffix)]) * factor)
            return int(text)
        if kind == "float":
            return float(text)
    except (ValueError, KeyError, OverflowError):
        raise SettingError(
            f"{text!r} is no {kind}", where=name, remedy=f"see {name} in the settings reference"
        ) from None
    return Path(text) if "Path" in kind else text


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from the environment, then from `--flag value` or `--flag=value`; raises `SettingError`."""
    known = {f.name: str(f.type) for f in fields(Settings)}
    values: dict[str, object] = {}
    for name, kind in known.items():
        text = environ.get(variable_of(name))
        if text is not None and text != "":
            values[name] = _parse(variable_of(name), kind, text)
    rest = list(argv)
    while rest:
        flag, has_value, text = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in known:
            raise SettingError(f"unknown argument {flag!r}", where="command line", remedy="see --help")
        if not has_value:
            if not rest:
                raise SettingError(f"{flag} needs a value", where="command line")
            text = rest.pop(0)
        values[name] = _parse(flag, known[name], text)
    missing = [f.name for f in fields(Settings) if f.default is MISSING and f.name not in values]
    if missing:
        names = ", ".join(f"{flag_of(name)} ({variable_of(name)})" for name in missing)
        raise SettingError(f"missing: {names}", where="settings")
    return Settings(**values)  # type: ignore[arg-type]  # _parse follows the annotations
