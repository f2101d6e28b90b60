"""The policy of one workload: a CheckpointPolicy over the chart's defaults, and the user's annotations over both.

`spec` documents are what the API serves for a CheckpointPolicy, or the chart's default policy of the same shape. What
they make together is judged by the schema that the API server has, too, policy.yaml. A policy that names a store takes
nothing of the default's store: one's bucket with another's credentials helps nobody.

Who states an interval or steps and no goal wants just these: then the goal is `fixed`, whatever the default's is. The
same holds for an encoding and what bits are chosen for. `fleet`, `deciding` and `reclaiming` are the cluster's: words
of the chart's file, never of a policy.
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
"""Before the name of a ClusterCheckpointPolicy."""
DEFAULT = "default"
"""Policy name that means the chart's default policy where the namespace has none of that name."""
MAX_CACHE_BYTES = 10 << 30
"""Most that a cache has where no `cacheSize` is stated: it is requested from the node's disk."""
BLOCK_BYTES = 8 << 20
"""Arenas are whole blocks of the sidecar's default block size."""
FIXED = "fixed"
RETAIN, DELETE = "Retain", "Delete"
_CLUSTER_ONLY = ("fleet", "deciding", "reclaiming")
_FIXED_GOALS = (
    ("interval", {"every", "everySteps"}, {"type": "Fixed"}),
    ("precision", {"encoding"}, "Fixed"),
)
"""Objects, their fields that say a thing, and the goal of who states one of these and no goal."""
_BITS_GOALS = {"Budget": "budget", "CheckNRun": "check-n-run", "Fixed": "", NO_BITS_RULE: ""}
DIRECTIVE_FIELDS = frozenset(pb.Policy.DESCRIPTOR.fields_by_name) - {"state_encoding"}
"""Fields of a sidecar's policy that a CheckpointPolicy says."""
_BUILTIN: Mapping[str, Any] = {
    "interval": {"every": "5m", "everySteps": 0, "goal": {"type": "Fixed"}, "atLeast": "0s", "atMost": "0s"},
    "precision": {"encoding": DEFAULT_ENCODING, "goal": "Fixed", "leastBits": 0, "tables": {}},
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
"""What is under the chart's default policy."""
_RESOURCES = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
"""The sidecar's, memory without the arena."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything injection and removal need to know, resolved."""

    name: str
    annotations: Annotations
    url: str
    """Store with endpoint and region, as the sidecar takes it; never with credentials."""
    store: Mapping[str, Any]
    sidecar: Mapping[str, Any]
    """With every field that has a default."""
    network: Mapping[str, Any]
    saving: pb.Policy
    """How its runs save: what their sidecars start with, and what a directive tells them."""
    arena_bytes: int
    cache_bytes: int
    """Disk for the sidecar's cache."""
    keep_last: int
    grace_s: int
    """Grace period a pod needs to save before it goes; given to pods that have the default 30."""
    fleet: str
    """host:port of the controller's report service; empty: none."""
    fleet_ca: str
    """PEM of the authority that vouches for it."""
    reclaim: str
    """What becomes of a finished run's bytes: Retain or Delete."""
    reclaim_after_s: float
    """Seconds from the end of the workload to their removal."""
    reclaim_account: str
    """Service account of the Job that removes them; empty: the namespace's default."""
    can_reclaim: bool
    """Whether the cluster lets the controller make that Job."""
    reclaim_labels: Mapping[str, str]
    """Labels of that Job, such as a queue's."""


def key_of(namespace: str, name: str) -> tuple[str, str]:
    """(namespace, name) of the policy that a workload of a namespace names; the cluster's has no namespace."""
    return ("", name.removeprefix(CLUSTER)) if name.startswith(CLUSTER) else (namespace, name)


def display_name(name: str) -> str:
    """The policy that a workload names, as refusals call it."""
    return f"{'Cluster' * name.startswith(CLUSTER)}CheckpointPolicy {name.removeprefix(CLUSTER)}"


def not_found(name: str, *, default: bool) -> Refusal:
    """The refusal of a workload whose policy does not exist; `default`: the chart has a default policy."""
    kind, bare = display_name(name).split()
    where = "" if name.startswith(CLUSTER) else " in the workload's namespace"
    remedy = "create it, or correct the name" + (f", or use {DEFAULT!r}" if default else "")
    what = f"there is no {kind} {bare!r}{where}"
    return Refusal("PolicyNotFound", what, where="deltashard.io/policy", remedy=remedy)


def merged(spec: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` over `defaults`; the cluster's words are the defaults' alone."""
    return _overlay({key: value for key, value in spec.items() if key not in _CLUSTER_ONLY}, defaults)


def _overlay(spec: Mapping[str, Any], under: Mapping[str, Any]) -> dict[str, Any]:
    """Field by field where a field is an object, but for `store`."""
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
    """The policy `name` with this (merged) spec, the annotations over it; raises `Refusal` (BadPolicy)."""
    annotations, checked = annotations or Annotations(policy=name), spec
    if "every" in annotations.spec.get("interval", {}):  # in the place of the policy's
        checked = merged({"interval": {"every": _BUILTIN["interval"]["every"]}}, spec)
    try:
        if violation := next(schema.violations(schema.POLICY, checked), None):
            raise _bad_policy(name, violation)
        found = _policy(name, _overlay(merged(annotations.spec, spec), _BUILTIN), annotations)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # older than the schema, or past it
        raise _bad_policy(name, f"it cannot be read: {type(error).__name__}: {error}") from None
    least_s, most_s = found.saving.least_s, found.saving.most_s
    if most_s and least_s > most_s:
        raise _bad_policy(name, f"spec.interval.atLeast, {least_s:g} s, is above atMost, {most_s:g} s")
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
    every_s, least_s, most_s = (duration.seconds_of(interval[key]) for key in ("every", "atLeast", "atMost"))
    saving = pb.Policy(
        every_s=every_s,
        every_steps=interval["everySteps"],
        encoding=precision["encoding"],
        differential=spec["differential"],
        tables=format_encodings(precision["tables"]),
    )
    goal, bits_goal = _goal(interval["goal"]), precision["goal"]
    if spec["deciding"]["enabled"] and goal != FIXED:
        saving.MergeFrom(pb.Policy(goal=goal, least_s=least_s, most_s=most_s))
    if spec["deciding"]["enabled"] and (bits := _BITS_GOALS.get(bits_goal, bits_goal)):
        saving.MergeFrom(pb.Policy(bits_goal=bits, least_bits=precision["leastBits"]))
    return saving


def _goal(goal: Mapping[str, Any] | str) -> str:
    """A goal as the sidecar takes it; an annotation says it so."""
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
    """An arena's size in bytes, rounded up to whole blocks."""
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES
