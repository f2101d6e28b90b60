"""Parsing of `deltashard.io/*` annotations. Errors name the key.

Annotations may be on a Job's metadata, on its pod template, or on both with equal values. Unknown `deltashard.io/` keys
are rejected, so that a misspelled `interval` is not silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_POLICY = r"(?!.{254})(cluster/)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_RESTORE_SOURCE = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(@[!-#%-~]{1,256})?"
"""The pin must not contain '$', which the kubelet expands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """Validated annotations of the user; empty if the key is absent."""

    policy: str
    container: str = ""
    run_id: str = ""
    runs: str = ""
    """Whether the workload's pods are ranks of one run or train one run each."""
    restore_from: str = ""
    """RUN or RUN@PIN from which a new run starts."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a policy's spec that override the policy."""


def _matching(pattern: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if re.fullmatch(pattern, text, re.ASCII) is None:
            raise ValueError
        return text

    return read


def _within(parse: Callable[[str], float], low: str, high: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not parse(low) <= parse(text) <= parse(high):
            raise ValueError
        return text

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    return _matching("|".join(words))


KEYS: Mapping[str, tuple[str, Callable[[str], str], str]] = {
    POLICY: (
        "policy",
        _matching(_POLICY),
        (
            "the name of a CheckpointPolicy in the workload's namespace, cluster/NAME of a ClusterCheckpointPolicy, "
            "or 'default'"
        ),
    ),
    CONTAINER: (
        "container",
        _matching(_LABEL),
        "the name of the container that trains; without it, the pod's default container, else the first one",
    ),
    RUN_ID: (
        "run_id",
        _matching(_LABEL),
        "a DNS label (at most 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit)",
    ),
    RUNS: (
        "runs",
        _one_of(ONE_RUN, RUN_PER_POD),
        "per-pod (each numbered pod trains its own run) or one (all pods are ranks of one run)",
    ),
    ARENA_SIZE: (
        "spec.arenaSize",
        _within(quantity.bytes_of, "64Mi", "1Ti"),
        "a quantity from 64Mi to 1Ti, such as 512Mi",
    ),
    INTERVAL: (
        "spec.interval.every",
        _within(duration.seconds_of, "0s", "168h"),
        "a duration up to 168h, such as 90s, 5m or 1h30m; 0s turns the timer off",
    ),
    GOAL: (
        "spec.interval.goal",
        duration.parse_goal,
        "auto, overhead=1% (at most 50%), lost-work=5m (at most 168h), pls=0.02 or fixed",
    ),
    ENCODING: (
        "spec.precision.encoding",
        _one_of(*ENCODING_CHOICES),
        f"one of {', '.join(ENCODING_CHOICES)}",
    ),
    PRECISION: (
        "spec.precision.goal",
        _one_of(*BITS_RULES, NO_BITS_RULE),
        f"one of {', '.join((*BITS_RULES, NO_BITS_RULE))}",
    ),
    RESTORE_FROM: (
        "restore_from",
        _matching(_RESTORE_SOURCE),
        "RUN or RUN@PIN: the run id of another run of the workload's namespace, in the same store",
    ),
}
"""Key -> (field of `Annotations`, parser that raises `ValueError`, accepted values for error messages)."""


def has_policy(*maps: Mapping[str, str] | None) -> bool:
    """Return whether one of these annotation maps has the policy key."""
    return any(POLICY in (each or {}) for each in maps)


def read(*maps: Mapping[str, str] | None) -> Annotations:
    """Parse the annotations of all maps together. Raises `Refusal` (BadAnnotation)."""
    found: dict[str, str] = {}
    for key, value in (item for each in maps for item in (each or {}).items()):
        if not key.startswith(PREFIX) or key in {INJECTED, CHECKPOINT_TIME}:
            continue
        if key not in KEYS:
            raise _bad_annotation(key, "there is no such annotation", f"known are {', '.join(KEYS)}")
        if found.setdefault(key, value) != value:
            what = f"it is {found[key]!r} on the workload and {value!r} on its pod template"
            raise _bad_annotation(key, what, "set it once")
    if POLICY not in found:
        raise _bad_annotation(POLICY, "it is missing", f"it must be {KEYS[POLICY][2]}")
    annotations: dict[str, Any] = {"spec": {}}
    for key, (name, reader, accepted) in KEYS.items():
        if key not in found:
            continue
        *path, last = name.split(".")
        place = annotations
        for each in path:
            place = place.setdefault(each, {})
        try:
            place[last] = reader(found[key])
        except ValueError:
            place[last] = ""
        own = key == RESTORE_FROM and found[key].partition("@")[0] == found.get(RUN_ID)
        if not place[last] or own:
            raise _bad_annotation(key, f"{found[key][:80]!r} is not valid", f"it must be {accepted}")
    return Annotations(**annotations)


def _bad_annotation(key: str, what: str, remedy: str) -> Refusal:
    return Refusal("BadAnnotation", what, where=key, remedy=remedy)
