"""The policy of one workload: a CheckpointPolicy over the chart's defaults, and the user's annotations over both.

`spec` documents are what the API serves for a `checkpointpolicies.deltashard.io` object, or the chart's default policy
of the same shape. A policy that names a store takes nothing of the default's store: one's bucket with another's
credentials helps nobody. The custom resource's schema refuses most nonsense before it is stored; here every value that
is used is checked once more, because a default policy comes from a file and a schema can be older than this code.
Fields that only the controller reads are not looked at.

Who states an interval or steps and no goal wants just these: then the goal is `fixed`, whatever the default's is. The
same holds for bits and what they are chosen for. `deciding` and `reclaiming` are the cluster's: a file's word, never a
policy's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from deltashard_checkpoint.vocabulary import (
    BITS_CHOICES,
    DEFAULT_DIFFERENTIAL,
    DEFAULT_ENCODING,
    DIFFERENTIALS,
    ENCODING_CHOICES,
    ENCODINGS,
)
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_operator.api import store_spec
from deltashard_operator.api.annotation import (
    MAX_ARENA_BYTES,
    MIN_ARENA_BYTES,
    NO_PRECISION,
    PRECISIONS,
    Annotations,
)
from deltashard_operator.api.extension import Extension, extension_of
from deltashard_operator.api.field import NAME, Fields
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.store_spec import WebIdentity
from deltashard_operator.kube.cluster_name import METRICS_PORT, USER_ID

DEFAULT = "default"
"""Policy name that means the chart's default policy where the namespace has none of that name."""
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
CACHE_ARENAS = 16
MAX_CACHE_BYTES = 10 << 30
"""Where no `cacheSize` is stated, the cache is so many arenas large, and at most so large: it is requested from the
node's disk, and a node that holds a small arena need not have 10 GiB to spare."""
BLOCK_BYTES = 8 << 20
"""Arenas are whole blocks of the sidecar's default block size."""
_ADDRESS = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}", re.ASCII)
FIXED = "fixed"
LEAST_BITS = (2, 3, 4, 8)
_DECIDING, _RECLAIMING = "deciding", "reclaiming"
_CLUSTERS = frozenset({_DECIDING, _RECLAIMING})
"""Fields that only a file may have."""
RETAIN, DELETE = "Retain", "Delete"
RECLAIM_POLICIES = (RETAIN, DELETE)
RECLAIM_AFTER_S = 7 * 86400
MAX_RECLAIM_AFTER_S = 10 * 365 * 86400
_STATES = (({"intervalSeconds", "everySteps"}, "interval"), ({"bits", "encoding"}, "precision"))
"""Fields that say a thing, and the field by which it is chosen instead."""
_BY_FIELD = ("sidecar", "network", "fleet", "interval", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything injection needs to know, resolved and checked."""

    name: str
    url: str
    """Store with endpoint and region, as the sidecar takes it; never with credentials."""
    secret_name: str | None = None
    """Secret with the store's credentials, in the workload's namespace; may be absent when the pod starts."""
    web_identity: WebIdentity | None = None
    every_s: float = 300.0
    every_steps: int = 0
    encoding: str = DEFAULT_ENCODING
    differential: str = DEFAULT_DIFFERENTIAL
    goal: str = FIXED
    """What the interval is chosen for; `every_s` is where it begins."""
    least_s: float = 0.0
    most_s: float = 0.0
    bits_goal: str = ""
    """What the bits are chosen for; empty: they are not."""
    least_bits: int = 0
    tables: str = ""
    """Encodings of single tables, as the sidecar takes them."""
    decides: bool = True
    """Whether the cluster lets intervals and bits be chosen."""
    arena_bytes: int = 256 << 20
    cache_bytes: int = 0
    """Disk for the sidecar's cache; never 0 once resolved."""
    keep_last: int = 3
    grace_s: int = 120
    """Grace period a pod needs to save before it goes; given to pods that have the default 30."""
    image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    cpu_request_millis: int = 500
    cpu_limit_millis: int = 2000
    memory_request_bytes: int = 512 << 20
    """Memory requested besides the arena, which is added."""
    memory_limit_bytes: int = 1 << 30
    """Limit of memory besides the arena, which is added."""
    storage_request_bytes: int | None = None
    """The sidecar's ephemeral-storage request; None: what its cache may take, and nothing in a queue."""
    storage_limit_bytes: int = 0
    """The sidecar's ephemeral-storage limit; 0: stated only where every container of the pod has one."""
    run_as_user: int | None = USER_ID
    """User of the sidecar; None leaves the choice to the cluster (OpenShift)."""
    metrics_port: int = METRICS_PORT
    """Port of the sidecar's metrics; 0: off."""
    host_network_metrics_port: int = 0
    """Port for pods on the host's network, where two pods of a node must not take one; 0: off."""
    fleet: str = ""
    """host:port of the controller's heartbeat service; empty: none."""
    fleet_ca: str = ""
    """PEM of the authority that vouches for it."""
    extension: Extension = field(default_factory=Extension)
    """Variables, volumes and the way to the network that the policy adds."""
    reclaim: str = RETAIN
    """What becomes of a finished run's bytes: Retain or Delete."""
    reclaim_after_s: int = RECLAIM_AFTER_S
    """Seconds from the end of the workload to their removal."""
    reclaim_account: str = ""
    """Service account of the Job that removes them; empty: the namespace's default."""
    reclaims: bool = False
    """Whether the cluster lets the controller make that Job."""
    reclaim_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of that Job, such as a queue's."""
    container: str | None = None
    run_id: str | None = None
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


def not_found(name: str, *, default: bool) -> Refusal:
    """The refusal of a workload whose policy does not exist; `default`: the chart has a default policy."""
    return Refusal(
        "PolicyNotFound",
        f"there is no CheckpointPolicy {name!r} in the workload's namespace",
        where="deltashard.io/policy",
        remedy="create it, or correct the name" + (f", or use {DEFAULT!r}" if default else ""),
    )


def merged(spec: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` over `defaults`: field by field for `sidecar`, `network`, `fleet`, `interval`, `precision`, else whole."""
    spec = {key: value for key, value in spec.items() if key not in _CLUSTERS}
    result = {**defaults, **spec}
    if {"bits", "encoding"} & set(spec):  # two ways to say one thing: the policy's, not one of each
        result = {k: v for k, v in result.items() if k in spec or k not in {"bits", "encoding"}}
    for key in _BY_FIELD:
        if isinstance(spec.get(key), Mapping) and isinstance(defaults.get(key), Mapping):
            result[key] = {**defaults[key], **spec[key]}
    for stated, key in _STATES:
        if (
            stated & set(spec)
            and isinstance(result.get(key), Mapping)
            and "goal" not in (spec.get(key) or {})
        ):
            result[key] = {**result[key], "goal": FIXED}
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
        policy = replace(policy, bits_goal=_precision(annotations.precision))
    if not policy.decides:
        policy = replace(policy, goal=FIXED, bits_goal="")
    return replace(
        policy,
        cache_bytes=policy.cache_bytes or min(CACHE_ARENAS * policy.arena_bytes, MAX_CACHE_BYTES),
        container=annotations.container,
        run_id=annotations.run_id,
        runs=annotations.runs or "",
    )


def _precision(word: str) -> str:
    return "" if word == NO_PRECISION else word


def read(name: str, spec: Mapping[str, Any]) -> Policy:
    """A policy from its (merged) spec; raises `Refusal` (BadPolicy) with a sentence that names the field."""
    top = Fields(name, "spec", spec)
    store = top.fields("store")
    sidecar = top.fields("sidecar")
    resources = sidecar.fields("resources")
    requests, limits = resources.fields("requests"), resources.fields("limits")
    fleet = top.fields("fleet")
    interval, precision = top.fields("interval"), top.fields("precision")
    least_s, most_s = (interval.integer(key, 0, high=7 * 86400) for key in ("leastSeconds", "mostSeconds"))
    if most_s and least_s > most_s:
        interval.fail("leastSeconds", f"seconds up to mostSeconds, which is {most_s}")
    bits = top.integer(
        "bits", ENCODINGS[DEFAULT_ENCODING].bits, low=min(BITS_CHOICES), high=max(BITS_CHOICES)
    )
    if bits not in BITS_CHOICES:
        top.fail("bits", f"one of {', '.join(map(str, BITS_CHOICES))}")
    cpu_request = requests.millis("cpu", 500)
    memory_request = requests.bytes("memory", 512 << 20)
    every_s = top.integer("intervalSeconds", 300, high=7 * 86400)
    every_steps = top.integer("everySteps", 0)
    if not every_s and not every_steps:
        top.fail("intervalSeconds", "seconds above 0, or 0 beside everySteps above 0")
    return Policy(
        name=name,
        url=store_spec.url_of(store),
        secret_name=store_spec.secret_of(store),
        web_identity=store_spec.identity_of(store),
        extension=extension_of(sidecar, top.fields("network")),
        every_s=float(every_s),
        every_steps=every_steps,
        encoding=top.choice("encoding", BITS_CHOICES[bits], ENCODING_CHOICES),
        differential=top.choice("differential", DEFAULT_DIFFERENTIAL, DIFFERENTIALS),
        goal=interval.goal("goal", FIXED),
        least_s=float(least_s),
        most_s=float(most_s),
        bits_goal=_precision(precision.choice("goal", NO_PRECISION, PRECISIONS)),
        least_bits=precision.one_of("leastBits", 0, LEAST_BITS),
        tables=precision.tables("tables"),
        arena_bytes=whole_blocks(
            top.bytes("arenaSize", 256 << 20, low=MIN_ARENA_BYTES, high=MAX_ARENA_BYTES)
        ),
        cache_bytes=top.bytes("cacheSize", 64 << 20, low=64 << 20) if "cacheSize" in spec else 0,
        keep_last=top.integer("keepLast", 3, low=1),
        grace_s=top.integer("gracePeriodSeconds", 120, low=5, high=86400),
        image=sidecar.text("image", "") or sidecar.fail("image", "the sidecar's image"),
        image_pull_policy=sidecar.choice("imagePullPolicy", "IfNotPresent", PULL_POLICIES),
        image_pull_secrets=sidecar.names("imagePullSecrets"),
        cpu_request_millis=cpu_request,
        cpu_limit_millis=max(cpu_request, limits.millis("cpu", 2000)),
        memory_request_bytes=memory_request,
        memory_limit_bytes=max(memory_request, limits.bytes("memory", 1 << 30)),
        storage_request_bytes=requests.bytes("ephemeral-storage", 0, low=0)
        if requests.says("ephemeral-storage")
        else None,
        storage_limit_bytes=limits.bytes("ephemeral-storage", 0, low=0),
        run_as_user=sidecar.nullable_integer("runAsUser", USER_ID),
        metrics_port=sidecar.integer("metricsPort", METRICS_PORT, high=65535),
        host_network_metrics_port=sidecar.integer("hostNetworkMetricsPort", 0, high=65535),
        reclaim=top.choice("reclaimPolicy", RETAIN, RECLAIM_POLICIES),
        reclaim_after_s=top.integer("reclaimAfterSeconds", RECLAIM_AFTER_S, high=MAX_RECLAIM_AFTER_S),
        reclaim_account=top.text("reclaimServiceAccount", "", NAME),
        decides=top.fields(_DECIDING).boolean("enabled", default=True),
        reclaim_labels=top.fields(_RECLAIMING).texts("labels", 16),
        reclaims=top.fields(_RECLAIMING).boolean("enabled", default=False),
        fleet=fleet.text("address", "", _ADDRESS),
        fleet_ca=fleet.text("ca", ""),
    )


def whole_blocks(n: int) -> int:
    """An arena's size in bytes, rounded up to whole blocks."""
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES
