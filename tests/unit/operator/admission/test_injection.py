"""Injection: preserved fields and refusals. tests/golden/pods records the added fields."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from deltashard_operator.admission.injection import inject
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import cluster_name, run_identity
from deltashard_sidecar import settings

from tests.support.operator import sample

VOLUME = {"name": "v", "mountPath": "/etc/files", "configMap": {"name": "c"}}
CLAIM = {"store": {"url": "file:///mnt/shared/training", "claim": "checkpoints"}}


def injected(
    template: dict[str, Any], spec: dict[str, Any] | None = None, /, **keywords: Any
) -> dict[str, Any]:
    """Inject the template under a policy; keyword arguments are annotations and arguments of `inject`."""
    how = {key: keywords.pop(key) for key in ("keep_grace", "queued") if key in keywords}
    before = copy.deepcopy(template)
    result = inject(template, sample.policy(spec, **keywords), run_identity.JOB, **how)
    assert template == before, "the argument is not modified"
    return result


def variables(
    template: dict[str, Any], spec: dict[str, Any] | None = None, /, **keywords: Any
) -> dict[str, str]:
    """Return the sidecar's environment as a kubelet expands it."""
    sidecar = sample.sidecar_of(injected(template, spec, **keywords))
    return sample.expanded(sidecar, {"metadata.namespace": "team-a"})


def test_injection_is_idempotent() -> None:
    """Another webhook version or another policy does not change a marked template."""
    once = injected(sample.template())
    assert injected(once) == once
    once["metadata"]["annotations"][cluster_name.INJECTED] = "0.0.1"
    assert injected(once, {"arenaSize": "1Gi"}) == once


def container(**fields: Any) -> dict[str, Any]:
    return sample.template(containers=[{"name": "t", **fields}])


def declared(**fields: Any) -> dict[str, Any]:
    return sample.template(volumes=[fields])


def owned(**source: Any) -> dict[str, Any]:
    return declared(name="data", persistentVolumeClaim={"claimName": "checkpoints", **source})


SMALL = {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}


@pytest.mark.parametrize(
    ("template", "spec", "code", "sentence"),
    [
        (container() | {"metadata": {"annotations": {cluster_name.INJECTED: "0.1.0"}}}, {}, "MarkerWithoutSidecar", "remove"),
        (sample.template(containers=[{"name": "deltashard-sidecar"}]), {}, "ContainerNameTaken", "rename"),
        (sample.template(initContainers=[{"name": "deltashard-sidecar"}]), {}, "ContainerNameTaken", "rename"),
        (declared(name="deltashard-shm", hostPath={"path": "/dev/shm"}), {}, "VolumeUnsupported", "the name is taken"),
        (declared(name="deltashard-token", emptyDir={}), {}, "VolumeUnsupported", "the name is taken"),
        (declared(name="v", emptyDir={}), {"sidecar": {"volumes": [VOLUME]}}, "VolumeUnsupported", "volume v: the name is taken"),
        (declared(name="deltashard-cache", emptyDir={"medium": "Memory"}), {}, "VolumeUnsupported", "the cache needs a disk"),
        (declared(name="deltashard-cache", emptyDir={"sizeLimit": "big"}), {}, "BadTemplate", "is not a quantity"),
        (declared(name="deltashard-store", emptyDir={}), CLAIM, "VolumeUnsupported", "the name is taken"),
        (owned(readOnly=True), CLAIM, "VolumeUnsupported", "it is a read-only volume of the store's claim checkpoints"),
        (container(volumeMounts=[{"name": "x", "mountPath": "/run/deltashard"}]), {}, "MountTaken", "volume 'x'"),
        (container(env=[{"name": "DELTASHARD_SOCKET", "value": "/tmp/s"}]), {}, "VariableTaken", "another value"),
        (sample.template(os={"name": "windows"}), {}, "Unsupported", "spec.os.name"),
        (sample.template(nodeSelector={"kubernetes.io/os": "windows"}), {}, "Unsupported", "on Linux only"),
        ({"spec": {}}, {}, "BadTemplate", "no containers"),
        (container(resources={"limits": {"cpu": "many", "memory": "1"}}), {}, "BadTemplate", "is not a quantity"),
        (container(**SMALL) | {"spec": {"containers": [{"name": "t", **SMALL}], "resources": {"requests": {"cpu": "1200m"}}}},
         {}, "PodResourcesTooSmall", "requests.cpu: it is 1200m, but the containers request 1 and deltashard-sidecar needs 500m"),
        (container(**SMALL) | {"spec": {"containers": [{"name": "t", **SMALL}], "resources": {"limits": {"memory": "2Gi"}}}},
         {}, "PodResourcesTooSmall", "raise it to at least 2304Mi"),
        (sample.template(initContainers=[{"name": "i", **SMALL}], resources={"limits": {"memory": "1500Mi"}}),
         {}, "PodResourcesTooSmall", "raise it to at least 2304Mi"),
        (owned(), {**CLAIM, "sidecar": {"volumes": [VOLUME | {"name": "data"}]}}, "VolumeUnsupported", "data: the name is taken"),
        (sample.template(), {"sidecar": {"env": [{"name": "POD_NAME", "value": "x"}]}}, "BadPolicy", "another field"),
        (sample.template(), {"sidecar": {"env": [{"name": "AWS_SHARED_CREDENTIALS_FILE", "value": "x"}]}}, "BadPolicy", "sets AWS"),
    ],
)  # fmt: skip
def test_unsupported_templates_are_refused(
    template: dict[str, Any], spec: dict[str, Any], code: str, sentence: str
) -> None:
    with pytest.raises(Refusal) as caught:
        injected(template, spec)
    assert caught.value.code == code
    assert sentence in caught.value.sentence


def test_only_the_named_container_gets_the_socket() -> None:
    template = sample.template(containers=[{"name": "a"}, {"name": "b"}], initContainers=[{"name": "i"}])
    result = injected(template, container="b")["spec"]
    assert (result["containers"][0], result["initContainers"][1]) == ({"name": "a"}, {"name": "i"})
    assert result["containers"][1]["env"] == [
        {"name": "DELTASHARD_SOCKET", "value": cluster_name.SOCKET_PATH}
    ]
    with pytest.raises(Refusal, match="no container 'c'") as caught:
        injected(template, container="c")
    assert "it must be one of a, b" in caught.value.sentence


@pytest.mark.parametrize(
    ("stated", "keep", "policy", "given", "saves"),
    [
        (None, False, "2m", 120, "115"),
        (30, False, "2m", 120, "115"),
        (30, False, "15s", 15, "10"),
        (30, True, "2m", 30, "25"),
        (0, False, "2m", 0, "1"),
        (29, False, "2m", 29, "24"),
        (600, False, "2m", 600, "595"),
    ],
)
def test_grace_period_is_changed_only_from_the_default(
    stated: int | None, keep: bool, policy: str, given: int, saves: str
) -> None:
    """The API's default is 30. Another value, or an explicit 30, is the user's choice."""
    template = sample.template(**({} if stated is None else {"terminationGracePeriodSeconds": stated}))
    result = injected(template, {"gracePeriod": policy}, keep_grace=keep)
    assert result["spec"].get("terminationGracePeriodSeconds") == given
    assert sample.expanded(sample.sidecar_of(result), {})["DELTASHARD_TERM_DEADLINE_S"] == saves


@pytest.mark.parametrize(
    ("context", "group", "after"),
    [
        (None, 65532, {"supplementalGroups": [65532]}),
        ({"supplementalGroups": [7, 8]}, 7, {"supplementalGroups": [7, 8]}),
        ({"fsGroup": 9}, 9, {"fsGroup": 9}),
        ({"fsGroup": 9, "supplementalGroups": [7]}, 7, {"fsGroup": 9, "supplementalGroups": [7]}),
    ],
)
def test_sidecar_shares_the_pods_group_or_adds_one(
    context: dict[str, Any] | None, group: int, after: dict[str, Any]
) -> None:
    """An existing group is reused. A group is added only if the pod has none. The sidecar's files belong to it."""
    result = injected(sample.template(**({} if context is None else {"securityContext": context})))
    assert result["spec"]["securityContext"] == after
    assert sample.sidecar_of(result)["securityContext"]["runAsGroup"] == group


@pytest.mark.parametrize(
    "proxy", ["istio-proxy", "linkerd-proxy", "consul-dataplane", "consul-dataplane-web", "kuma-sidecar"]
)
def test_mesh_proxy_starts_first(proxy: str) -> None:
    """The sidecar has no network before the proxy runs. A proxy that is an ordinary container is not the trainer."""
    template = sample.template(initContainers=[{"name": "a"}, {"name": proxy}, {"name": "b"}])
    order = [c["name"] for c in injected(template)["spec"]["initContainers"]]
    assert order == ["a", proxy, "deltashard-sidecar", "b"]
    first = sample.template(containers=[{"name": proxy}, {"name": "t"}])
    assert "env" not in injected(first)["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("template", "spec", "port", "declares"),
    [
        (sample.template(), {}, "24464", True),
        (sample.template(hostNetwork=True), {}, "-1", False),
        (sample.template(hostNetwork=True), {"hostNetworkMetricsPort": 19464}, "19464", False),
        (container(ports=[{"containerPort": 24464}]), {}, "-1", False),
    ],
)
def test_metrics_port_avoids_used_ports(
    template: dict[str, Any], spec: dict[str, Any], port: str, declares: bool
) -> None:
    """Used ports are those of the user's containers, of the node and of the exporters in Prometheus' registry."""
    sidecar = sample.sidecar_of(injected(template, {"sidecar": spec}))
    assert sample.expanded(sidecar, {})["DELTASHARD_METRICS_PORT"] == port
    assert ("ports" in sidecar) == declares
    assert cluster_name.METRICS_PORT not in {*range(9090, 10000), *range(10000, 20001), *range(30000, 65536)}


def test_declared_cache_volume_sets_the_cache_size() -> None:
    """A volume with the cache's name is used as declared. A cache on another volume requests no node disk."""
    result = injected(declared(name="deltashard-cache", emptyDir={"sizeLimit": "100Gi"}))
    sidecar = sample.sidecar_of(result)
    assert sample.expanded(sidecar, {})["DELTASHARD_CACHE_BYTES"] == str((100 << 30) * 9 // 10)
    assert sidecar["resources"]["requests"]["ephemeral-storage"] == "100Gi"
    assert [v["name"] for v in result["spec"]["volumes"]].count("deltashard-cache") == 1
    claim = declared(name="deltashard-cache", persistentVolumeClaim={"claimName": "c"})
    assert "ephemeral-storage" not in sample.sidecar_of(injected(claim))["resources"]["requests"]


def test_existing_claim_volume_is_reused() -> None:
    result = injected(owned(), CLAIM)
    mounts = sample.sidecar_of(result)["volumeMounts"]
    assert {"name": "data", "mountPath": "/mnt/shared"} in mounts
    assert "deltashard-store" not in {each["name"] for each in result["spec"]["volumes"]}


def test_startup_probe_timeout_grows_with_the_arena() -> None:
    """Touching a terabyte takes longer than touching a hundred megabytes."""
    small, large = (
        sample.sidecar_of(injected(sample.template(), {"arenaSize": size}))["startupProbe"][
            "failureThreshold"
        ]
        for size in ("64Mi", "64Gi")
    )
    assert (small * 2 >= 120, (large - small) * 2 >= 4 * 63) == (True, True)


GOAL = {"interval": {"goal": {"type": "LostWork", "lostWork": "5m"}, "min": "30s", "max": "15m"}}
TABLES = {"goal": "Budget", "minBits": 4, "tables": {"emb.user": "q8", "emb.item": "q4"}}


@pytest.mark.parametrize(
    ("spec", "annotations", "chosen"),
    [
        ({}, {}, {}),
        ({"interval": {"min": "30s"}}, {}, {}),
        (GOAL, {}, {"GOAL": "lost-work=5m", "MIN_INTERVAL_S": "30", "MAX_INTERVAL_S": "900"}),
        ({"precision": TABLES}, {}, {"BITS_GOAL": "budget", "MIN_BITS": "4", "TABLES": "emb.item=q4,emb.user=q8"}),
        ({"interval": {"every": "60s"}}, {"spec": {"interval": {"goal": "auto"}}}, {"GOAL": "auto"}),
    ],
)  # fmt: skip
def test_goal_and_bounds_are_passed_to_the_sidecar(
    spec: dict[str, Any], annotations: dict[str, Any], chosen: dict[str, str]
) -> None:
    values = variables(sample.template(), spec, **annotations)
    paths = {"DELTASHARD_RUN": "team/train", "DELTASHARD_DIR": "/tmp/d", "DELTASHARD_CACHE_DIR": "/tmp/c"}
    settings.load([], values | paths)
    names = ("GOAL", "MIN_INTERVAL_S", "MAX_INTERVAL_S", "BITS_GOAL", "MIN_BITS", "TABLES")
    found = {name: values[f"DELTASHARD_{name}"] for name in names if f"DELTASHARD_{name}" in values}
    assert (found, "DELTASHARD_PROFILE_KEY" in values) == (chosen, "GOAL" in chosen)


def test_cost_profile_key_is_image_limits_and_node_type() -> None:
    template = sample.template(
        nodeSelector={"node.kubernetes.io/instance-type": "m7i.4xlarge", "zone": "a"},
        containers=[
            {
                "name": "t",
                "image": "team/train:v3",
                "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}},
            }
        ],
    )
    assert variables(template, GOAL)["DELTASHARD_PROFILE_KEY"] == (
        "team/train:v3, cpu 2, memory 8Gi, m7i.4xlarge"
    )


def test_run_starts_from_a_checkpoint_of_its_own_namespace() -> None:
    found = variables(sample.template(), restore_from="exp@best")
    assert found["DELTASHARD_RESTORE_FROM"] == "team-a/exp@best"


AMOUNTS = {"cpu": "1", "memory": "1Gi"}
GUARANTEED = {"resources": {"limits": AMOUNTS}}
DISK = {"resources": {"limits": {"ephemeral-storage": "5Gi"}}}


@pytest.mark.parametrize(
    ("pod", "stated", "requests", "limits"),
    [
        ({"containers": [{"name": "t"}]}, {}, ("500m", "768Mi", "4Gi"), ("2", "1280Mi", None)),
        ({"containers": [{"name": "t", **GUARANTEED}]}, {}, ("2", "1280Mi", "4Gi"), ("2", "1280Mi", None)),
        (  # static CPU managers pin whole CPUs
            {"containers": [{"name": "t", "resources": {"limits": AMOUNTS, "requests": {"cpu": "1000m"}}}]},
            {"limits": {"cpu": "1500m"}}, ("2", "1280Mi", "4Gi"), ("2", "1280Mi", None),
        ),
        (
            {"containers": [{"name": "t", **GUARANTEED}], "initContainers": [{"name": "i"}]},
            {}, ("500m", "768Mi", "4Gi"), ("2", "1280Mi", None),
        ),
        ({"containers": [{"name": "t", **DISK}, {"name": "u"}]}, {}, ("500m", "768Mi", "4Gi"), ("2", "1280Mi", None)),
        ({"containers": [{"name": "t", **DISK}]}, {}, ("500m", "768Mi", "4Gi"), ("2", "1280Mi", "5Gi")),
        (
            {"containers": [{"name": "t"}]},
            {"limits": {"ephemeral-storage": "30Gi"}}, ("500m", "768Mi", "4Gi"), ("2", "1280Mi", "30Gi"),
        ),
        (
            {"containers": [{"name": "t"}]},
            {"requests": {"ephemeral-storage": "0"}}, ("500m", "768Mi", None), ("2", "1280Mi", None),
        ),
        (  # a container's limit must not exceed the pod's
            {"containers": [{"name": "t", **SMALL}], "resources": {"limits": {"cpu": "1500m", "memory": "4Gi"}}},
            {}, ("500m", "768Mi", "4Gi"), ("1500m", "1280Mi", None),
        ),
    ],
)  # fmt: skip
def test_sidecar_resources_keep_the_qos_class_and_cover_the_arena(
    pod: dict[str, Any], stated: dict[str, Any], requests: tuple[Any, ...], limits: tuple[Any, ...]
) -> None:
    """The pod's QoS class does not change, memory covers the arena, and a LimitRange can add only the storage limit."""
    found = sample.sidecar_of(injected(sample.template(**pod), {"sidecar": {"resources": stated}}))
    assert tuple(
        tuple(found["resources"][part].get(name) for name in ("cpu", "memory", "ephemeral-storage"))
        for part in ("requests", "limits")
    ) == (requests, limits)
