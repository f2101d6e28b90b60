"""Policy of one workload: a CheckpointPolicy over the chart's defaults, overridden by the user's annotations.

`spec` documents are the specs of CheckpointPolicies, or the chart's default policy in the same form. The merged result
is validated by the API server's schema, policy.yaml. A policy with a store inherits nothing from the default's store,
because one bucket with the other's credentials would not work.

An explicit interval or step count without a goal implies the goal `fixed`, whatever the default's goal is. The same
holds for an encoding and the goal of the bits. `fleet`, `deciding` and `reclaiming` are cluster settings: only the
chart's file sets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.deciding.precision import format_encodings
from deltashard_checkpoint.vocabulary import DEFAULT_DIFFERENTIAL, DEFAULT_ENCODING, NO_BITS_RULE
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_operator.api import duration, schema, store_access
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import quantity
from deltashard_operator.kube.cluster_name import METRICS_PORT, USER_ID

CLUSTER = "cluster/"
"""Prefix of the name of a ClusterCheckpointPolicy."""
DEFAULT = "default"
"""Policy name that means the chart's default policy if the namespace has no policy of that name."""
MAX_CACHE_BYTES = 10 << 30
"""Maximum default cache size. It is requested from the node's disk."""
BLOCK_BYTES = 8 << 20
"""Arena sizes are multiples of the sidecar's default block size."""
FIXED = "fixed"
RETAIN, DELETE = "Retain", "Delete"
_CLUSTER_ONLY = ("fleet", "deciding", "reclaiming")
_FIXED_GOALS = (
    ("interval", {"every", "everySteps"}, {"type": "Fixed"}),
    ("precision", {"encoding"}, "Fixed"),
)
"""Objects, their explicit fields, and the goal implied by such a field without a goal."""
_BITS_GOALS = {"Budget": "budget", "CheckNRun": "check-n-run", "Fixed": "", NO_BITS_RULE: ""}
DIRECTIVE_FIELDS = frozenset(pb.Policy.DESCRIPTOR.fields_by_name) - {"state_encoding"}
"""Fields of a sidecar's policy that a CheckpointPolicy sets."""
_BUILTIN: Mapping[str, Any] = {
    "interval": {"every": "5m", "everySteps": 0, "goal": {"type": "Fixed"}, "min": "0s", "max": "0s"},
    "precision": {"encoding": DEFAULT_ENCODING, "goal": "Fixed", "minBits": 0, "tables": {}},
    "differential": DEFAULT_DIFFERENTIAL,
    "arenaSize": "256Mi",
    "keepLast": 3,
    "gracePeriod": "2m",
    "reclaim": {"policy": RETAIN, "after": "168h", "serviceAccount": ""},
    "sidecar": {
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": (),
        "resources": {},
        "env": (),
        "volumes": (),
        "runAsUser": USER_ID,
        "metricsPort": METRICS_PORT,
        "hostNetworkMetricsPort": 0,
    },
    "network": {},
    "fleet": {"address": "", "ca": ""},
    "deciding": {"enabled": True},
    "reclaiming": {"enabled": False, "labels": {}},
}
"""Built-in values under the chart's default policy."""
_RESOURCES = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
"""Default resources of the sidecar; memory without the arena."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Resolved policy with everything that injection and removal need."""

    name: str
    annotations: Annotations
    url: str
    """Store URL with endpoint and region, in the sidecar's form, without credentials."""
    store: Mapping[str, Any]
    sidecar: Mapping[str, Any]
    """With defaults filled in."""
    network: Mapping[str, Any]
    saving: pb.Policy
    """How its runs save: initial settings of the sidecars, and the content of directives."""
    arena_bytes: int
    cache_bytes: int
    keep_last: int
    grace_s: int
    """Grace period that a pod needs for a final save; applied to pods with the default of 30 s."""
    fleet: str
    """host:port of the controller's report service; empty if there is none."""
    fleet_ca: str
    reclaim: str
    """Retain or Delete: what happens to a finished run's bytes."""
    reclaim_after_s: float
    reclaim_account: str
    """Service account of the removal Job; empty: the namespace's default."""
    can_reclaim: bool
    """Whether the cluster allows the controller to create the removal Job."""
    reclaim_labels: Mapping[str, str]
    """Labels of the removal Job, such as a queue name."""


def key_of(namespace: str, name: str) -> tuple[str, str]:
    """Return (namespace, name) of a policy reference; the namespace of a cluster policy is empty."""
    return ("", name.removeprefix(CLUSTER)) if name.startswith(CLUSTER) else (namespace, name)


def display_name(name: str) -> str:
    return f"{'Cluster' * name.startswith(CLUSTER)}CheckpointPolicy {name.removeprefix(CLUSTER)}"


def not_found(name: str, *, default: bool) -> Refusal:
    """Return the refusal of a workload whose policy does not exist. `default`: the chart has a default policy."""
    kind, bare = display_name(name).split()
    where = "" if name.startswith(CLUSTER) else " in the workload's namespace"
    remedy = "create it, or correct the name" + (f", or use {DEFAULT!r}" if default else "")
    what = f"there is no {kind} {bare!r}{where}"
    return Refusal("PolicyNotFound", what, where="deltashard.io/policy", remedy=remedy)


def merged(spec: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `spec` over `defaults`. Cluster settings come from the defaults only."""
    return _overlay({key: value for key, value in spec.items() if key not in _CLUSTER_ONLY}, defaults)


def _overlay(spec: Mapping[str, Any], under: Mapping[str, Any]) -> dict[str, Any]:
    """Overlay objects field by field, except `store`."""
    result = {**under, **spec}
    for key, value in spec.items():
        if isinstance(value, Mapping) and isinstance(under.get(key), Mapping) and key != "store":
            result[key] = {**under[key], **value}
    for key, stated, goal in _FIXED_GOALS:
        field = spec.get(key)
        if isinstance(field, Mapping) and stated & field.keys() and "goal" not in field:
            result[key] = {**result[key], "goal": goal}
    return result


def read(name: str, spec: Mapping[str, Any], annotations: Annotations | None = None) -> Policy:
    """Return the policy `name` with this merged spec, overridden by the annotations. Raises `Refusal` (BadPolicy)."""
    annotations, checked = annotations or Annotations(policy=name), spec
    if "every" in annotations.spec.get("interval", {}):  # overrides the policy's
        checked = merged({"interval": {"every": _BUILTIN["interval"]["every"]}}, spec)
    try:
        if violation := next(schema.violations(schema.POLICY, checked), None):
            raise _bad_policy(name, violation)
        found = _policy(name, _overlay(merged(annotations.spec, spec), _BUILTIN), annotations)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # accepted by an older schema, or not validated
        raise _bad_policy(name, f"it cannot be read: {type(error).__name__}: {error}") from None
    min_interval_s, max_interval_s = found.saving.min_interval_s, found.saving.max_interval_s
    if max_interval_s and min_interval_s > max_interval_s:
        raise _bad_policy(
            name, f"spec.interval.min, {min_interval_s:g} s, is above max, {max_interval_s:g} s"
        )
    return found


def _bad_policy(name: str, what: str) -> Refusal:
    remedy = "change the policy, or the chart's default policy under it"
    return Refusal("BadPolicy", what, where=display_name(name), remedy=remedy)


def _policy(name: str, spec: Mapping[str, Any], annotations: Annotations) -> Policy:
    store, sidecar, reclaim = spec.get("store", {}), spec["sidecar"], spec["reclaim"]
    for path, value in (("store.url", store.get("url")), ("sidecar.image", sidecar.get("image"))):
        if not value:
            raise _bad_policy(name, f"spec.{path} is missing")
    stated = sidecar["resources"]
    resources = {part: {**usual, **stated.get(part, {})} for part, usual in _RESOURCES.items()}
    arena_bytes = whole_blocks(quantity.bytes_of(spec["arenaSize"]))
    return Policy(
        name=name,
        annotations=annotations,
        url=store_access.url_of(store),
        store=store,
        sidecar={**sidecar, "resources": resources},
        network={} if "claim" in store else spec["network"],
        saving=_saving(spec),
        arena_bytes=arena_bytes,
        cache_bytes=quantity.bytes_of(spec.get("cacheSize", min(16 * arena_bytes, MAX_CACHE_BYTES))),
        keep_last=spec["keepLast"],
        grace_s=int(duration.seconds_of(spec["gracePeriod"])),
        fleet=spec["fleet"]["address"],
        fleet_ca=spec["fleet"]["ca"],
        reclaim=reclaim["policy"],
        reclaim_after_s=duration.seconds_of(reclaim["after"]),
        reclaim_account=reclaim["serviceAccount"],
        can_reclaim=spec["reclaiming"]["enabled"],
        reclaim_labels=spec["reclaiming"]["labels"],
    )


def _saving(spec: Mapping[str, Any]) -> pb.Policy:
    interval, precision = spec["interval"], spec["precision"]
    every_s, min_interval_s, max_interval_s = (
        duration.seconds_of(interval[key]) for key in ("every", "min", "max")
    )
    saving = pb.Policy(
        every_s=every_s,
        every_steps=interval["everySteps"],
        encoding=precision["encoding"],
        differential=spec["differential"],
        tables=format_encodings(precision["tables"]),
    )
    goal, bits_goal = _goal(interval["goal"]), precision["goal"]
    if spec["deciding"]["enabled"] and goal != FIXED:
        saving.MergeFrom(pb.Policy(goal=goal, min_interval_s=min_interval_s, max_interval_s=max_interval_s))
    if spec["deciding"]["enabled"] and (bits := _BITS_GOALS.get(bits_goal, bits_goal)):
        saving.MergeFrom(pb.Policy(bits_goal=bits, min_bits=precision["minBits"]))
    return saving


def _goal(goal: Mapping[str, Any] | str) -> str:
    """Return a goal in the sidecar's form. Annotations already have that form."""
    if isinstance(goal, str):
        return goal
    match goal["type"]:
        case "Overhead":
            text = f"overhead={goal['overhead']}"
        case "LostWork":
            text = f"lost-work={goal['lostWork']}"
        case "PLS":
            text = f"pls={goal['pls']}"
        case other:
            text = other.lower()
    return duration.parse_goal(text)


def whole_blocks(n: int) -> int:
    """Round an arena size in bytes up to whole blocks."""
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES
