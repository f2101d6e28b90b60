"""What a user may say in `deltashard.io/*` annotations: read, checked, refused with a sentence that names the key.

Annotations stand on a Job's own metadata, on its pod template, or on both; both may say the same thing and never
different things. An unknown key of ours is refused: a misspelled `interval` must not silently train without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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

MIN_ARENA_BYTES = 64 << 20
MAX_ARENA_BYTES = 1 << 40
MAX_INTERVAL_S = 7 * 86400.0
NO_PRECISION = NO_BITS_RULE
PRECISIONS = (*BITS_RULES, NO_PRECISION)
"""What bits may be chosen for, and that they are not chosen."""

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_POLICY = re.compile(r"(?!.{254})(cluster/)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_SOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(@[!-#%-~]{1,256})?", re.ASCII)
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
    arena, interval, encoding = found.get(ARENA_SIZE), found.get(INTERVAL), found.get(ENCODING)
    if encoding not in (None, *ENCODING_CHOICES):
        raise _wrong(ENCODING, str(encoding))
    precision = found.get(PRECISION)
    if precision is not None and precision not in PRECISIONS:
        raise _wrong(PRECISION, precision)
    runs = found.get(RUNS)
    if runs not in (None, ONE_RUN, RUN_PER_POD):
        raise _wrong(RUNS, runs)
    source = found.get(RESTORE_FROM)
    if source is not None and source.partition("@")[0] == found.get(RUN_ID):
        raise _wrong(RESTORE_FROM, source)
    return Annotations(
        policy=_matching(_POLICY, POLICY, found[POLICY]),
        container=_matching(_LABEL, CONTAINER, found[CONTAINER]) if CONTAINER in found else None,
        run_id=_matching(_LABEL, RUN_ID, found[RUN_ID]) if RUN_ID in found else None,
        runs=runs,
        arena_bytes=None if arena is None else _arena_bytes(arena),
        every_s=None if interval is None else _interval_s(interval),
        encoding=encoding,
        goal=_goal(found[GOAL]) if GOAL in found else None,
        precision=precision,
        restore_from=None if source is None else _matching(_SOURCE, RESTORE_FROM, source),
    )


def _wrong(key: str, value: str) -> Refusal:
    return Refusal(
        "BadAnnotation", f"{value[:80]!r} is not possible", where=key, remedy=f"it takes {TAKES[key]}"
    )


def _matching(pattern: re.Pattern[str], key: str, value: str) -> str:
    if pattern.fullmatch(value) is None:
        raise _wrong(key, value)
    return value


def _goal(text: str) -> str:
    try:
        return duration.goal_of(text)
    except ValueError:
        raise _wrong(GOAL, text) from None


def _arena_bytes(text: str) -> int:
    try:
        n = quantity.bytes_of(text)
    except ValueError:
        raise _wrong(ARENA_SIZE, text) from None
    if not MIN_ARENA_BYTES <= n <= MAX_ARENA_BYTES:
        raise _wrong(ARENA_SIZE, text)
    return n


def seconds(value: float) -> str:
    """An interval as a variable has it: with all its milliseconds, and no more digits than it needs."""
    return f"{value:.10g}"


def _interval_s(text: str) -> float:
    try:
        interval_s = duration.seconds_of(text)
    except ValueError:
        raise _wrong(INTERVAL, text) from None
    if interval_s > MAX_INTERVAL_S:
        raise _wrong(INTERVAL, text)
    return interval_s
