"""The policy of one workload: a CheckpointPolicy over the chart's defaults, and the user's annotations over both.

`spec` documents are what the API serves for a CheckpointPolicy, or the chart's default policy of the same shape. A
policy that names a store takes nothing of the default's store: one's bucket with another's credentials helps nobody.
Fields that only the controller reads are not looked at.

Who states an interval or steps and no goal wants just these: then the goal is `fixed`, whatever the default's is. The
same holds for an encoding and what bits are chosen for. `fleet`, `deciding` and `reclaiming` are the cluster's: words
of the chart's file, never of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from deltashard_checkpoint.deciding.precision import MAX_TABLES, text_of
from deltashard_checkpoint.vocabulary import DEFAULT_DIFFERENTIAL, DEFAULT_ENCODING
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_operator.api import duration, schema, store_spec
from deltashard_operator.api.annotation import NO_PRECISION, Annotations
from deltashard_operator.api.extension import Extension, extension_of
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.store_spec import WebIdentity
from deltashard_operator.kube import quantity
from deltashard_operator.kube.cluster_name import METRICS_PORT, USER_ID

CLUSTER = "cluster/"
"""Before the name of a ClusterCheckpointPolicy."""
DEFAULT = "default"
"""Policy name that means the chart's default policy where the namespace has none of that name."""
CACHE_ARENAS = 16
MAX_CACHE_BYTES = 10 << 30
"""Where no `cacheSize` is stated, the cache is so many arenas large, and at most so large: it is requested from the
node's disk, and a node that holds a small arena need not have 10 GiB to spare."""
BLOCK_BYTES = 8 << 20
"""Arenas are whole blocks of the sidecar's default block size."""
FIXED = "fixed"
_CLUSTERS = ("fleet", "deciding", "reclaiming")
RETAIN, DELETE = "Retain", "Delete"
_STATES = (("interval", {"every", "everySteps"}, {"type": "Fixed"}), ("precision", {"encoding"}, "Fixed"))
"""Objects, their fields that say a thing, and the goal of who states one of these and no goal."""
_BY_FIELD = ("sidecar", "network", "interval", "precision", "reclaim")
_PRECISIONS = {"Budget": "budget", "CheckNRun": "check-n-run", "Fixed": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything injection needs to know, resolved and checked."""

    name: str
    url: str
    """Store with endpoint and region, as the sidecar takes it; never with credentials."""
    secret_name: str | None
    """Secret with the store's credentials, in the workload's namespace; may be absent when the pod starts."""
    secret_key: str
    web_identity: WebIdentity | None
    claim: str
    """PersistentVolumeClaim of the workload's namespace that a `file://` store lies on; empty: it is another store."""
    every_s: float
    every_steps: int
    encoding: str
    differential: str
    goal: str
    """What the interval is chosen for; `every_s` is where it begins."""
    least_s: float
    most_s: float
    bits_goal: str
    """What the bits are chosen for; empty: they are not."""
    least_bits: int
    tables: str
    """Encodings of single tables, as the sidecar takes them."""
    decides: bool
    """Whether the cluster lets intervals and bits be chosen."""
    arena_bytes: int
    cache_bytes: int
    """Disk for the sidecar's cache; never 0 once resolved."""
    keep_last: int
    grace_s: int
    """Grace period a pod needs to save before it goes; given to pods that have the default 30."""
    image: str
    image_pull_policy: str
    image_pull_secrets: tuple[str, ...]
    cpu_request_millis: int
    cpu_limit_millis: int
    memory_request_bytes: int
    """Memory requested besides the arena, which is added."""
    memory_limit_bytes: int
    """Limit of memory besides the arena, which is added."""
    storage_request_bytes: int | None
    """The sidecar's ephemeral-storage request; None: what its cache may take, and nothing in a queue."""
    storage_limit_bytes: int
    """The sidecar's ephemeral-storage limit; 0: stated only where every container of the pod has one."""
    run_as_user: int | None
    """User of the sidecar; None leaves the choice to the cluster (OpenShift)."""
    metrics_port: int
    """Port of the sidecar's metrics; 0: off."""
    host_network_metrics_port: int
    """Port for pods on the host's network, where two pods of a node must not take one; 0: off."""
    fleet: str
    """host:port of the controller's report service; empty: none."""
    fleet_ca: str
    """PEM of the authority that vouches for it."""
    extension: Extension
    """Variables, volumes and the way to the network that the policy adds."""
    reclaim: str
    """What becomes of a finished run's bytes: Retain or Delete."""
    reclaim_after_s: float
    """Seconds from the end of the workload to their removal."""
    reclaim_account: str
    """Service account of the Job that removes them; empty: the namespace's default."""
    reclaims: bool
    """Whether the cluster lets the controller make that Job."""
    reclaim_labels: Mapping[str, str]
    """Labels of that Job, such as a queue's."""
    container: str | None = None
    run_id: str | None = None
    restore_from: str = ""
    """RUN or RUN@PIN that a run without a log begins with; empty: none."""
    runs: str = ""
    """Whether the workload's pods are ranks of one run, or a run each; empty: nobody said."""

    @property
    def saving(self) -> pb.Policy:
        """How its runs save: what their sidecars start with, and what a directive tells them."""
        unused = {"goal", "least_s", "most_s"} if self.goal == FIXED else set()
        if not self.bits_goal:
            unused.add("least_bits")
        return pb.Policy(**{name: getattr(self, name) for name in OFFERED - unused})


OFFERED = {each.name for each in fields(Policy)}.intersection(pb.Policy.DESCRIPTOR.fields_by_name)
"""Fields of a sidecar's policy that a CheckpointPolicy says: those that have its field's name."""


def key_of(namespace: str, name: str) -> tuple[str, str]:
    """(namespace, name) of the policy that a workload of a namespace names; the cluster's has no namespace."""
    return ("", name.removeprefix(CLUSTER)) if name.startswith(CLUSTER) else (namespace, name)


def called(name: str) -> str:
    """The policy that a workload names, as refusals call it."""
    return f"{'Cluster' * name.startswith(CLUSTER)}CheckpointPolicy {name.removeprefix(CLUSTER)}"


def not_found(name: str, *, default: bool) -> Refusal:
    """The refusal of a workload whose policy does not exist; `default`: the chart has a default policy."""
    cluster, bare = name.startswith(CLUSTER), name.removeprefix(CLUSTER)
    return Refusal(
        "PolicyNotFound",
        f"there is no ClusterCheckpointPolicy {bare!r}"
        if cluster
        else f"there is no CheckpointPolicy {name!r} in the workload's namespace",
        where="deltashard.io/policy",
        remedy="create it, or correct the name" + (f", or use {DEFAULT!r}" if default else ""),
    )


def merged(spec: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` over `defaults`: field by field where a field is an object, but for `store`."""
    spec = {key: value for key, value in spec.items() if key not in _CLUSTERS}
    result = {**defaults, **spec}
    for key in _BY_FIELD:
        if isinstance(spec.get(key), Mapping) and isinstance(defaults.get(key), Mapping):
            result[key] = {**defaults[key], **spec[key]}
    for key, stated, goal in _STATES:
        said = spec.get(key)
        if isinstance(said, Mapping) and stated & set(said) and "goal" not in said:
            result[key] = {**result[key], "goal": goal}
    return result


def resolve(name: str, spec: Mapping[str, Any], annotations: Annotations) -> Policy:
    """The policy `name` with this (merged) spec, and the user's annotations over it; raises `Refusal` (BadPolicy)."""
    policy = read(name, spec)
    if annotations.arena_bytes is not None:
        policy = replace(policy, arena_bytes=whole_blocks(annotations.arena_bytes))
    if annotations.every_s is not None:
        policy = replace(policy, every_s=annotations.every_s, goal=FIXED)
    if annotations.encoding is not None:
        policy = replace(policy, encoding=annotations.encoding, bits_goal="")
    if annotations.goal is not None:
        policy = replace(policy, goal=annotations.goal)
    if annotations.precision is not None:
        chosen = "" if annotations.precision == NO_PRECISION else annotations.precision
        policy = replace(policy, bits_goal=chosen)
    if not policy.decides:
        policy = replace(policy, goal=FIXED, bits_goal="")
    return replace(
        policy,
        cache_bytes=policy.cache_bytes or min(CACHE_ARENAS * policy.arena_bytes, MAX_CACHE_BYTES),
        container=annotations.container,
        run_id=annotations.run_id,
        runs=annotations.runs or "",
        restore_from=annotations.restore_from or "",
    )


def read(name: str, spec: Mapping[str, Any]) -> Policy:
    """A policy from its (merged) spec; raises `Refusal` (BadPolicy) with a sentence that names the field."""
    where = called(name)
    cluster = {key: spec.get(key, {}) for key in _CLUSTERS}
    document = {key: value for key, value in spec.items() if key not in _CLUSTERS}
    try:
        schema.check(schema.spec(), document, "spec")
        return _policy(name, document, cluster)
    except schema.Unfit as unfit:
        raise Refusal("BadPolicy", str(unfit), where=where, remedy=unfit.remedy) from None


def _policy(name: str, spec: Mapping[str, Any], cluster: Mapping[str, Any]) -> Policy:
    store, sidecar = spec.get("store", {}), spec.get("sidecar", {})
    for path, value in (("store.url", store.get("url")), ("sidecar.image", sidecar.get("image"))):
        if value is None:
            part, _, key = path.partition(".")
            takes = schema.takes(schema.spec()["properties"][part]["properties"][key])
            raise schema.Unfit.at(f"spec.{path}", None, takes)
    interval, precision, reclaim = (spec.get(key, {}) for key in ("interval", "precision", "reclaim"))
    least_s, most_s = (_seconds(interval, key, "0s") for key in ("atLeast", "atMost"))
    if most_s and least_s > most_s:
        raise schema.Unfit.at(
            "spec.interval.atLeast", interval["atLeast"], f"at most atMost, which is {interval['atMost']}"
        )
    tables = text_of(precision.get("tables", {}))
    if len(tables) > MAX_TABLES:
        raise schema.Unfit.at("spec.precision.tables", tables, f"at most {MAX_TABLES} characters in all")
    secret, resources = store.get("secretRef", {}), sidecar.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    cpu, memory = quantity.millis_of(requests.get("cpu", "500m")), _bytes(requests, "memory", "512Mi")
    return Policy(
        name=name,
        url=store_spec.url_of(store),
        secret_name=secret.get("name"),
        secret_key=secret.get("key", "credentials"),
        web_identity=store_spec.identity_of(store),
        claim=store.get("claim", ""),
        # A claim is reached by no network of the sidecar's, and waits for nothing of it.
        extension=extension_of(sidecar, {} if "claim" in store else spec.get("network", {})),
        every_s=_seconds(interval, "every", "5m"),
        every_steps=interval.get("everySteps", 0),
        encoding=precision.get("encoding", DEFAULT_ENCODING),
        differential=spec.get("differential", DEFAULT_DIFFERENTIAL),
        goal=_goal(interval.get("goal", {"type": "Fixed"})),
        least_s=least_s,
        most_s=most_s,
        bits_goal=_PRECISIONS[precision.get("goal", "Fixed")],
        least_bits=precision.get("leastBits", 0),
        tables=tables,
        arena_bytes=whole_blocks(_bytes(spec, "arenaSize", "256Mi")),
        cache_bytes=_bytes(spec, "cacheSize", "0"),
        keep_last=spec.get("keepLast", 3),
        grace_s=int(_seconds(spec, "gracePeriod", "2m")),
        image=sidecar["image"],
        image_pull_policy=sidecar.get("imagePullPolicy", "IfNotPresent"),
        image_pull_secrets=tuple(sidecar.get("imagePullSecrets", ())),
        cpu_request_millis=cpu,
        cpu_limit_millis=max(cpu, quantity.millis_of(limits.get("cpu", "2"))),
        memory_request_bytes=memory,
        memory_limit_bytes=max(memory, _bytes(limits, "memory", "1Gi")),
        storage_request_bytes=_bytes(requests, "ephemeral-storage", "0")
        if "ephemeral-storage" in requests
        else None,
        storage_limit_bytes=_bytes(limits, "ephemeral-storage", "0"),
        run_as_user=sidecar.get("runAsUser", USER_ID),
        metrics_port=sidecar.get("metricsPort", METRICS_PORT),
        host_network_metrics_port=sidecar.get("hostNetworkMetricsPort", 0),
        reclaim=reclaim.get("policy", RETAIN),
        reclaim_after_s=_seconds(reclaim, "after", "168h"),
        reclaim_account=reclaim.get("serviceAccount", ""),
        decides=cluster["deciding"].get("enabled", True),
        reclaims=cluster["reclaiming"].get("enabled", False),
        reclaim_labels=cluster["reclaiming"].get("labels", {}),
        fleet=cluster["fleet"].get("address", ""),
        fleet_ca=cluster["fleet"].get("ca", ""),
    )


def _goal(goal: Mapping[str, Any]) -> str:
    """A goal as the sidecar takes it."""
    match goal["type"]:
        case "Overhead":
            said = f"overhead={goal['overhead']}"
        case "LostWork":
            said = f"lost-work={goal['lostWork']}"
        case "PLS":
            said = f"pls={goal['pls']}"
        case other:
            said = other.lower()
    return duration.goal_of(said)


def _seconds(fields: Mapping[str, Any], key: str, default: str) -> float:
    return duration.seconds_of(fields.get(key, default))


def _bytes(fields: Mapping[str, Any], key: str, default: str) -> int:
    return quantity.bytes_of(fields.get(key, default))


def whole_blocks(n: int) -> int:
    """An arena's size in bytes, rounded up to whole blocks."""
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES
