"""What a user may say in `deltashard.io/*` annotations: read, checked, refused with a sentence that names the key.

Annotations stand on a Job's own metadata, on its pod template, or on both; both may say the same thing and never
different things. An unknown key of ours is refused: a misspelled `interval` must not silently train without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from deltashard_checkpoint.vocabulary import BITS_RULES, ENCODING_CHOICES, NO_BITS_RULE, ONE_RUN, RUN_PER_POD

from deltashard_operator.api import duration
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import quantity
from deltashard_operator.kube.cluster_name import (
    ARENA_SIZE,
    CHECKPOINT_TIME,
    CONTAINER,
    ENCODING,
    GOAL,
    INJECTED,
    INTERVAL,
    POLICY,
    PRECISION,
    PREFIX,
    RESTORE_FROM,
    RUN_ID,
    RUNS,
)

_N = TypeVar("_N", int, float)
MIN_ARENA_BYTES = 64 << 20
MAX_ARENA_BYTES = 1 << 40
MAX_INTERVAL_S = 7 * 86400.0
NO_PRECISION = NO_BITS_RULE
PRECISIONS = (*BITS_RULES, NO_PRECISION)
"""What bits may be chosen for, and that they are not chosen."""

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_POLICY = r"(?!.{254})(cluster/)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_SOURCE = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(@[!-#%-~]{1,256})?"
"""A pin without '$', which the kubelet would read."""

TAKES = {
    POLICY: "the name of a CheckpointPolicy in the workload's namespace, cluster/NAME of a ClusterCheckpointPolicy, "
    "or 'default'",
    CONTAINER: "the name of the container that trains; without it, the pod's default container, else the first one",
    RUN_ID: "a DNS label (at most 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit)",
    RUNS: "per-pod (each numbered pod trains a run of its own) or one (all pods are ranks of one run)",
    ARENA_SIZE: "a quantity from 64Mi to 1Ti, such as 512Mi",
    INTERVAL: "a duration up to 168h, such as 90s, 5m or 1h30m; 0s turns the timer off",
    GOAL: "auto, overhead=1% (at most 50%), lost-work=5m (at most 168h), pls=0.02 or fixed",
    ENCODING: f"one of {', '.join(ENCODING_CHOICES)}",
    PRECISION: f"one of {', '.join(PRECISIONS)}",
    RESTORE_FROM: "RUN or RUN@PIN: the run id of another run of the workload's namespace, in the same store",
}
"""Key -> what it takes, as every refusal says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """The user's annotations, checked; None where a key is absent."""

    policy: str
    container: str | None = None
    run_id: str | None = None
    runs: str | None = None
    arena_bytes: int | None = None
    every_s: float | None = None
    encoding: str | None = None
    goal: str | None = None
    precision: str | None = None
    restore_from: str | None = None


def opted_in(*maps: Mapping[str, str] | None) -> bool:
    """Whether any of these annotation maps holds the policy key."""
    return any(POLICY in (each or {}) for each in maps)


def read(*maps: Mapping[str, str] | None) -> Annotations:
    """The annotations in these maps taken together; raises `Refusal` (BadAnnotation)."""
    found: dict[str, str] = {}
    for each in maps:
        for key, value in (each or {}).items():
            if not key.startswith(PREFIX) or key in {INJECTED, CHECKPOINT_TIME}:
                continue
            if key not in TAKES:
                raise Refusal(
                    "BadAnnotation",
                    "there is no such annotation",
                    where=key,
                    remedy=f"known are {', '.join(TAKES)}",
                )
            if found.setdefault(key, value) != value:
                raise Refusal(
                    "BadAnnotation",
                    f"the workload says {found[key]!r} and its pod template says {value!r}",
                    where=key,
                    remedy="say it once",
                )
    if POLICY not in found:
        raise Refusal("BadAnnotation", "it is missing", where=POLICY, remedy=f"it takes {TAKES[POLICY]}")
    said: dict[str, Any] = {}
    for key, (name, reader) in _READERS.items():
        if key in found:
            try:
                said[name] = reader(found[key])
            except ValueError:
                raise _wrong(key, found[key]) from None
    source = found.get(RESTORE_FROM, "")
    if source and source.partition("@")[0] == found.get(RUN_ID):
        raise _wrong(RESTORE_FROM, source)
    return Annotations(**said)


def _wrong(key: str, value: str) -> Refusal:
    return Refusal(
        "BadAnnotation", f"{value[:80]!r} is not possible", where=key, remedy=f"it takes {TAKES[key]}"
    )


def _matching(pattern: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if re.fullmatch(pattern, text, re.ASCII) is None:
            raise ValueError
        return text

    return read


def _within(least: float, parse: Callable[[str], _N], most: float) -> Callable[[str], _N]:
    def read(text: str) -> _N:
        if not least <= (number := parse(text)) <= most:
            raise ValueError
        return number

    return read


_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    POLICY: ("policy", _matching(_POLICY)),
    CONTAINER: ("container", _matching(_LABEL)),
    RUN_ID: ("run_id", _matching(_LABEL)),
    RUNS: ("runs", _matching(f"{ONE_RUN}|{RUN_PER_POD}")),
    ARENA_SIZE: ("arena_bytes", _within(MIN_ARENA_BYTES, quantity.bytes_of, MAX_ARENA_BYTES)),
    INTERVAL: ("every_s", _within(0, duration.seconds_of, MAX_INTERVAL_S)),
    GOAL: ("goal", duration.goal_of),
    ENCODING: ("encoding", _matching("|".join(ENCODING_CHOICES))),
    PRECISION: ("precision", _matching("|".join(PRECISIONS))),
    RESTORE_FROM: ("restore_from", _matching(_SOURCE)),
}
"""Key -> the field of `Annotations`, and what reads it; a `ValueError`: it is none."""


def seconds(value: float) -> str:
    """An interval as a variable has it: with all its milliseconds, and no more digits than it needs."""
    return f"{value:.10g}"
