"""Injection: what is added, what is respected, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from deltashard_operator.admission.injection import group_of, inject
from deltashard_operator.api import workload_policy
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import cluster_name, run_identity
from deltashard_sidecar import settings

from tests.support.operator import sample


def injected(template: dict[str, Any], spec: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """The template, injected under a policy; keyword arguments are annotations (`keep_grace` aside)."""
    keep = kwargs.pop("keep_grace", False)
    before = copy.deepcopy(template)
    result = inject(template, sample.policy(spec, **kwargs), run_identity.JOB, keep_grace=keep)
    assert template == before, "the argument is not touched"
    return result


def refusal(template: dict[str, Any], **kwargs: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        injected(template, **kwargs)
    return caught.value


def test_twice_is_once() -> None:
    """A marked template is left alone, even by another version or under another policy."""
    once = injected(sample.template())
    assert injected(once) == once
    once["metadata"]["annotations"][cluster_name.INJECTED] = "0.0.1"
    assert injected(once, {"arenaSize": "1Gi"}) == once


def test_a_taken_name_is_refused_with_a_code() -> None:
    """A container of our name without our marker is somebody else's; a marker without it is a stray."""
    taken = sample.template(containers=[{"name": "deltashard-sidecar"}])
    assert refusal(taken).code == "ContainerNameTaken"
    init = sample.template(initContainers=[{"name": "deltashard-sidecar"}])
    assert refusal(init).code == "ContainerNameTaken"
    stray = sample.template()
    stray["metadata"]["annotations"] = {cluster_name.INJECTED: "0.1.0"}
    assert refusal(stray).code == "MarkerWithoutSidecar"


def test_the_named_container_gets_the_socket_and_nobody_else() -> None:
    """Volume and variable go to one container only; an unknown name lists the known ones."""
    template = sample.template(containers=[{"name": "a"}, {"name": "b"}], initContainers=[{"name": "i"}])
    result = injected(template, container="b")["spec"]
    assert result["containers"][0] == {"name": "a"}
    assert result["initContainers"][1] == {"name": "i"}
    assert result["containers"][1]["env"] == [
        {"name": "DELTASHARD_SOCKET", "value": cluster_name.SOCKET_PATH}
    ]
    assert "it takes one of a, b" in refusal(template, container="c").sentence


def test_credentials_and_tokens_are_mounted_in_the_sidecar_alone() -> None:
    """The training container sees neither the Secret nor a token, and no key is in any environment."""
    result = injected(sample.template())["spec"]
    assert [m["name"] for m in result["containers"][0]["volumeMounts"]] == ["deltashard-shm"]
    mounts = {m["name"]: m for m in sample.sidecar_of({"spec": result})["volumeMounts"]}
    assert mounts["deltashard-store"]["readOnly"]
    assert mounts["deltashard-token"]["readOnly"]
    store = next(v for v in result["volumes"] if v["name"] == "deltashard-store")
    assert store["secret"]["optional"] is True
    assert not any(
        "secretKeyRef" in str(c.get("env")) for c in result["containers"] + result["initContainers"]
    )


def test_web_identity_takes_the_place_of_the_secret() -> None:
    """A projected token of its own audience, and the variables S3 clients know."""
    store = {"url": "s3://bucket", "webIdentity": {"audience": "minio", "stsEndpoint": "http://minio:9000"}}
    result = injected(sample.template(), {"store": store})
    sources = next(v for v in result["spec"]["volumes"] if v["name"] == "deltashard-token")["projected"][
        "sources"
    ]
    assert {s["serviceAccountToken"]["audience"] for s in sources} == {"deltashard-fleet", "minio"}
    values = sample.expanded(sample.sidecar_of(result), {})
    assert values["AWS_WEB_IDENTITY_TOKEN_FILE"] == "/var/run/secrets/deltashard/store"
    assert "AWS_SHARED_CREDENTIALS_FILE" not in values
    assert not any(v["name"] == "deltashard-store" for v in result["spec"]["volumes"])


def test_grace_is_changed_from_the_default_only() -> None:
    """30 is the API's default; any other value, and a 30 known to be written, is the user's."""
    assert injected(sample.template())["spec"]["terminationGracePeriodSeconds"] == 120
    assert (
        injected(sample.template(terminationGracePeriodSeconds=30))["spec"]["terminationGracePeriodSeconds"]
        == 120
    )
    for kept in (0, 29, 31, 600):
        result = injected(sample.template(terminationGracePeriodSeconds=kept))
        assert result["spec"]["terminationGracePeriodSeconds"] == kept
    result = injected(sample.template(terminationGracePeriodSeconds=30), keep_grace=True)
    assert result["spec"]["terminationGracePeriodSeconds"] == 30
    assert sample.expanded(sample.sidecar_of(result), {})["DELTASHARD_TERM_DEADLINE_S"] == "25"
    spot = injected(sample.template(), {"gracePeriod": "15s"})
    assert spot["spec"]["terminationGracePeriodSeconds"] == 15
    assert sample.expanded(sample.sidecar_of(spot), {})["DELTASHARD_TERM_DEADLINE_S"] == "10"


@pytest.mark.parametrize(
    ("context", "group", "after"),
    [
        (None, 65532, {"supplementalGroups": [65532]}),
        ({"runAsUser": 0}, 65532, {"runAsUser": 0, "supplementalGroups": [65532]}),
        ({"supplementalGroups": [7, 8]}, 7, {"supplementalGroups": [7, 8]}),
        ({"fsGroup": 9}, 9, {"fsGroup": 9}),
        ({"fsGroup": 9, "supplementalGroups": [7]}, 7, {"fsGroup": 9, "supplementalGroups": [7]}),
    ],
)
def test_the_shared_group(context: dict[str, Any] | None, group: int, after: dict[str, Any]) -> None:
    """An existing group is reused, one is appended only where there is none; the sidecar's files belong to it."""
    template = sample.template(**({} if context is None else {"securityContext": context}))
    result = injected(template)
    assert result["spec"]["securityContext"] == after
    security = sample.sidecar_of(result)["securityContext"]
    assert (security["runAsGroup"], security["runAsUser"]) == (group, 65532)
    assert group_of(result["spec"]) == group, "the same answer after injection"


def test_openshift_chooses_the_user() -> None:
    """A null runAsUser in the policy leaves it out."""
    security = sample.sidecar_of(injected(sample.template(), {"sidecar": {"runAsUser": None}}))[
        "securityContext"
    ]
    assert "runAsUser" not in security
    assert security["runAsNonRoot"] is True


def test_first_but_behind_the_mesh() -> None:
    """Before every init container, so that they can be long; behind istio-proxy, without which there is no network."""
    template = sample.template(initContainers=[{"name": "a"}, {"name": "istio-proxy"}, {"name": "b"}])
    order = [c["name"] for c in injected(template)["spec"]["initContainers"]]
    assert order == ["a", "istio-proxy", "deltashard-sidecar", "b"]
    order = [
        c["name"] for c in injected(sample.template(initContainers=[{"name": "a"}]))["spec"]["initContainers"]
    ]
    assert order == ["deltashard-sidecar", "a"]


@pytest.mark.parametrize(
    "proxy", ["istio-proxy", "linkerd-proxy", "consul-dataplane", "consul-dataplane-web", "kuma-sidecar"]
)
def test_any_meshs_proxy_goes_first(proxy: str) -> None:
    """The sidecar has no network before it; and a proxy that is an ordinary container does not train."""
    template = sample.template(initContainers=[{"name": "a"}, {"name": proxy}, {"name": "b"}])
    order = [c["name"] for c in injected(template)["spec"]["initContainers"]]
    assert order == ["a", proxy, "deltashard-sidecar", "b"]
    proxy_first = sample.template(containers=[{"name": proxy}, {"name": "t"}])
    assert "env" not in injected(proxy_first)["spec"]["containers"][0]


def test_the_probe_waits_longer_for_a_larger_arena() -> None:
    """Touching a terabyte takes longer than touching a hundred megabytes."""

    def patience(size: str) -> int:
        probe = sample.sidecar_of(injected(sample.template(), {"arenaSize": size}))["startupProbe"]
        return probe["failureThreshold"] * probe["periodSeconds"]

    assert patience("64Mi") >= 120
    assert patience("64Gi") - patience("64Mi") >= 4 * 63


def test_a_sidecar_that_hangs_is_restarted_and_a_slow_one_is_not() -> None:
    """By the command that answers the startup probe, after minutes."""
    sidecar = sample.sidecar_of(injected(sample.template()))
    probe = sidecar["livenessProbe"]
    assert probe["exec"] == sidecar["startupProbe"]["exec"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 300


def test_host_network_takes_no_port_of_the_node() -> None:
    """No declared port, metrics off or on a port the policy chose."""
    off = sample.sidecar_of(injected(sample.template(hostNetwork=True)))
    assert "ports" not in off
    assert sample.expanded(off, {})["DELTASHARD_METRICS_PORT"] == "-1"
    policy = {"sidecar": {"hostNetworkMetricsPort": 19464}}
    chosen = sample.sidecar_of(injected(sample.template(hostNetwork=True), policy))
    assert "ports" not in chosen
    assert sample.expanded(chosen, {})["DELTASHARD_METRICS_PORT"] == "19464"


def test_a_port_the_user_declares_is_left_to_the_user() -> None:
    """Metrics give way."""
    template = sample.template(containers=[{"name": "t", "ports": [{"containerPort": 24464}]}])
    sidecar = sample.sidecar_of(injected(template))
    assert "ports" not in sidecar
    assert sample.expanded(sidecar, {})["DELTASHARD_METRICS_PORT"] == "-1"


def test_declared_volumes_size_ours() -> None:
    """A volume of our name is used as declared; the cache's budget follows its size."""
    volumes = [
        {"name": "deltashard-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "deltashard-cache", "emptyDir": {"sizeLimit": "100Gi"}},
        {"name": "deltashard-store", "csi": {"driver": "secrets-store.csi.k8s.io"}},
    ]
    result = injected(sample.template(volumes=volumes))
    assert result["spec"]["volumes"][:3] == volumes
    assert [v["name"] for v in result["spec"]["volumes"][3:]] == ["deltashard-token"]
    sidecar = sample.sidecar_of(result)
    assert sample.expanded(sidecar, {})["DELTASHARD_CACHE_BYTES"] == str((100 << 30) * 9 // 10)
    assert sidecar["resources"]["requests"]["ephemeral-storage"] == "100Gi"


@pytest.mark.parametrize(
    ("volume", "said"),
    [
        ({"name": "deltashard-shm", "emptyDir": {}}, "no emptyDir in memory"),
        ({"name": "deltashard-shm", "hostPath": {"path": "/dev/shm"}}, "no emptyDir in memory"),
        (
            {"name": "deltashard-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
            "at least 272Mi",
        ),
        ({"name": "deltashard-cache", "emptyDir": {"medium": "Memory"}}, "the cache needs a disk"),
        ({"name": "deltashard-token", "emptyDir": {}}, "the name is taken"),
    ],
)
def test_a_declared_volume_that_cannot_serve_is_refused(volume: dict[str, Any], said: str) -> None:
    """With what it should be."""
    found = refusal(sample.template(volumes=[volume]))
    assert found.code == "VolumeUnfit"
    assert said in found.sentence


def test_a_taken_mount_or_variable_is_refused_and_our_own_respected() -> None:
    """The user may have written exactly what we add; anything else in its place cannot work."""
    ours = {
        "name": "t",
        "volumeMounts": [{"name": "deltashard-shm", "mountPath": "/run/deltashard/"}],
        "env": [{"name": "DELTASHARD_SOCKET", "value": cluster_name.SOCKET_PATH}],
    }
    assert injected(sample.template(containers=[ours]))["spec"]["containers"] == [ours]
    mount = {"name": "t", "volumeMounts": [{"name": "x", "mountPath": "/run/deltashard"}]}
    assert refusal(sample.template(containers=[mount])).code == "MountTaken"
    variable = {"name": "t", "env": [{"name": "DELTASHARD_SOCKET", "value": "/tmp/s"}]}
    assert refusal(sample.template(containers=[variable])).code == "VariableTaken"


def test_what_cannot_be_injected_at_all() -> None:
    """Windows pods, and templates without containers."""
    assert refusal(sample.template(os={"name": "windows"})).code == "Unsupported"
    assert refusal(sample.template(nodeSelector={"kubernetes.io/os": "windows"})).code == "Unsupported"
    assert refusal({"spec": {}}).code == "BadTemplate"


def test_the_metrics_port_is_no_exporters() -> None:
    """The sidecar has it first: 9464 is OpenTelemetry's, and Prometheus' registry gives 9100 to 9999 and 10000 to 20000."""
    assert cluster_name.METRICS_PORT not in {*range(9090, 10000), *range(10000, 20001)}
    assert cluster_name.METRICS_PORT < 30000, "neither a Service's NodePort nor one that a client gets"


def test_pull_secrets_are_added_once() -> None:
    """The policy's, where the pod has not got them."""
    assert injected(sample.template())["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    both = injected(sample.template(imagePullSecrets=[{"name": "own"}, {"name": "pull"}]))["spec"]
    assert both["imagePullSecrets"] == [{"name": "own"}, {"name": "pull"}]


def chosen(spec: dict[str, Any], **annotations: Any) -> dict[str, str]:
    """Variables of what is chosen, in a pod under this policy; the sidecar takes them."""
    names = ("GOAL", "LEAST_S", "MOST_S", "BITS_GOAL", "LEAST_BITS", "TABLES")
    env = sample.sidecar_of(injected(sample.template(), spec, **annotations))["env"]
    values = {each["name"]: each["value"] for each in env if "value" in each}
    paths = {"DELTASHARD_RUN": "team/train", "DELTASHARD_DIR": "/tmp/d", "DELTASHARD_CACHE_DIR": "/tmp/c"}
    settings.load([], values | paths)
    return {name: values[f"DELTASHARD_{name}"] for name in names if f"DELTASHARD_{name}" in values}


def test_a_goal_and_its_bounds_reach_the_sidecar_and_without_one_nothing_does() -> None:
    assert chosen({}) == {}
    assert chosen({"interval": {"atLeast": "30s"}}) == {}, "nothing to choose for"
    assert chosen(
        {"interval": {"goal": {"type": "LostWork", "lostWork": "5m"}, "atLeast": "30s", "atMost": "15m"}}
    ) == {
        "GOAL": "lost-work=5m",
        "LEAST_S": "30",
        "MOST_S": "900",
    }
    precision = {
        "goal": "Budget",
        "leastBits": 4,
        "tables": {"emb.user": "q8", "emb.item": "q4"},
    }
    assert chosen({"precision": precision}) == {
        "BITS_GOAL": "budget",
        "LEAST_BITS": "4",
        "TABLES": "emb.item=q4,emb.user=q8",
    }
    assert chosen({"interval": {"every": "60s"}}, goal="auto")["GOAL"] == "auto"


def test_what_saves_cost_is_remembered_by_image_limits_and_node_type() -> None:
    template = sample.template(nodeSelector={"node.kubernetes.io/instance-type": "m7i.4xlarge", "zone": "a"})
    trainer = template["spec"]["containers"][0]
    trainer |= {
        "image": "team/train:v3",
        "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}},
    }
    env = sample.sidecar_of(injected(template, {"interval": {"goal": {"type": "Auto"}}}))["env"]
    key = "team/train:v3, cpu 2, memory 8Gi, m7i.4xlarge"
    assert {"name": "DELTASHARD_PROFILE_KEY", "value": key} in env
    assert "DELTASHARD_PROFILE_KEY" not in {
        each["name"] for each in sample.sidecar_of(injected(template))["env"]
    }


def test_where_the_cluster_turns_deciding_off_new_pods_choose_nothing() -> None:
    off = {
        **sample.DEFAULTS,
        "interval": {"goal": {"type": "Auto"}},
        "precision": {"goal": "Budget"},
        "deciding": {"enabled": False},
    }
    said = Annotations(policy="p", goal="auto", precision="budget")
    policy = workload_policy.resolve("p", workload_policy.merged({}, off), said)
    container = sample.sidecar_of(inject(sample.template(), policy, run_identity.JOB, keep_grace=False))
    assert not {"DELTASHARD_GOAL", "DELTASHARD_BITS_GOAL"} & {each["name"] for each in container["env"]}


def test_a_run_begins_with_a_checkpoint_of_its_own_namespace() -> None:
    sidecar = sample.sidecar_of(injected(sample.template(), restore_from="exp@best"))
    values = sample.expanded(sidecar, {"metadata.namespace": "team-a"})
    assert values["DELTASHARD_RESTORE_FROM"] == "team-a/exp@best"
