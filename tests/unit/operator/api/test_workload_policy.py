"""Policies: defaults, overrides by annotations, the sidecar's settings, and messages for invalid values."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
from deltashard_checkpoint.stores.url import options_of, scheme_of
from deltashard_operator.api import store_access, workload_policy
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import merged, read

from tests.support.operator import sample


def test_policy_overrides_defaults_and_annotations_override_policy() -> None:
    """A different store inherits no store settings of the default. A null user is a valid choice."""
    spec = {
        "store": {"url": "s3://bkt/p", "region": "eu-1"},
        "precision": {"encoding": "q4"},
        "arenaSize": "100Mi",
        "sidecar": {"runAsUser": None, "resources": {"requests": {"cpu": "1"}}},
        "network": {"caBundle": {"configMap": "c"}},
    }
    defaults = {**sample.DEFAULTS, "network": {"httpsProxy": "http://proxy:1"}, "gracePeriod": "5m"}
    policy = read("p", merged(spec, defaults))
    assert (policy.url, policy.store) == ("s3://bkt/p?region=eu-1", spec["store"])
    assert (policy.sidecar["image"], policy.sidecar["runAsUser"]) == (
        sample.DEFAULTS["sidecar"]["image"],
        None,
    )
    assert policy.sidecar["resources"] == {
        "requests": {"cpu": "1", "memory": "512Mi"},
        "limits": {"cpu": "2", "memory": "1Gi"},
    }
    assert policy.network == {"httpsProxy": "http://proxy:1", "caBundle": {"configMap": "c"}}
    assert (policy.saving.encoding, policy.grace_s, policy.arena_bytes) == ("q4", 300, 104 << 20)
    annotations = Annotations(policy="p", spec={"precision": {"encoding": "q2"}, "arenaSize": "65Mi"})
    policy = read("p", merged(spec, defaults), annotations)
    assert (policy.saving.encoding, policy.arena_bytes) == ("q2", 72 << 20)


CHOOSING = {
    **sample.DEFAULTS,
    "interval": {"goal": {"type": "Auto"}, "max": "15m"},
    "precision": {"goal": "Budget"},
}
EVERY = {"interval": {"every": "1m"}}


@pytest.mark.parametrize(
    ("spec", "annotations", "goals"),
    [
        ({}, {}, ("auto", "budget")),
        (EVERY, {}, ("", "budget")),
        ({"interval": {"everySteps": 60}}, {}, ("", "budget")),
        ({"interval": {"every": "1m", "max": "15m"}}, {}, ("", "budget")),
        ({"interval": {"every": "1m", "goal": {"type": "Auto"}}}, {}, ("auto", "budget")),
        ({"precision": {"encoding": "q4"}}, {}, ("auto", "")),
        ({"precision": {"encoding": "q4", "goal": "CheckNRun"}}, {}, ("auto", "check-n-run")),
        ({"precision": {"goal": "Fixed"}}, {}, ("auto", "")),
        ({}, EVERY, ("", "budget")),
        ({}, {"interval": {"every": "1m", "goal": "auto"}}, ("auto", "budget")),
        ({}, {"precision": {"encoding": "q4"}}, ("auto", "")),
        ({}, {"precision": {"encoding": "q4", "goal": "budget"}}, ("auto", "budget")),
        (EVERY, {"interval": {"goal": "lost-work=5m"}}, ("lost-work=5m", "budget")),
        ({}, {"interval": {"goal": "fixed"}, "precision": {"goal": "fixed"}}, ("", "")),
    ],
)
def test_explicit_value_without_a_goal_disables_the_default_goal(
    spec: dict[str, Any], annotations: dict[str, Any], goals: tuple[str, str]
) -> None:
    """Applies to every default goal. The default's bounds stay."""
    saving = read("p", merged(spec, CHOOSING), Annotations(policy="p", spec=annotations)).saving
    assert ((saving.goal, saving.bits_goal), saving.max_interval_s) == (goals, 900 if goals[0] else 0)


def test_cluster_can_disable_deciding_for_all_policies() -> None:
    off = {**CHOOSING, "deciding": {"enabled": False}}
    spec = {"deciding": {"enabled": True}, "interval": {"goal": {"type": "Auto"}}}
    annotations = Annotations(policy="p", spec={"precision": {"goal": "budget"}})
    saving = read("p", merged(spec, off), annotations).saving
    assert (saving.goal, saving.bits_goal) == ("", "")
    assert read("p", merged({"deciding": {"enabled": False}}, CHOOSING)).saving.goal == "auto"


def test_reclaim_of_finished_runs_by_policy_and_cluster() -> None:
    spec = {"reclaim": {"policy": "Delete", "serviceAccount": "trainer"}, "reclaiming": {"enabled": True}}
    policy = sample.policy(spec)
    assert (policy.reclaim, policy.reclaim_after_s, policy.reclaim_account) == ("Delete", 604800, "trainer")
    assert not policy.can_reclaim, "a policy cannot enable what the cluster disables"
    allowed = {**sample.DEFAULTS, "reclaiming": {"enabled": True}}
    policy = read("p", merged({"reclaim": {"after": "0s"}}, allowed))
    assert (policy.reclaim, policy.reclaim_after_s, policy.can_reclaim) == ("Retain", 0, True)


@pytest.mark.parametrize(
    ("spec", "arena", "cache_bytes"),
    [
        ({}, None, 4 << 30),
        ({}, "128Mi", 2 << 30),
        ({"arenaSize": "64Gi"}, None, 10 << 30),
        ({"arenaSize": "64Mi", "cacheSize": "100Gi"}, None, 100 << 30),
    ],
)
def test_cache_size_is_explicit_or_proportional_to_the_arena(
    spec: dict[str, Any], arena: str | None, cache_bytes: int
) -> None:
    """A small arena requests less than 10 GiB of a node with little disk, and no arena requests more."""
    annotations = {"spec": {"arenaSize": arena}} if arena else {}
    assert sample.policy(spec, **annotations).cache_bytes == cache_bytes


CLAIM = {"url": "file:///mnt/shared", "claim": "checkpoints"}
AT_MNT = {"name": "v", "mountPath": "/mnt/shared/x", "configMap": {"name": "c"}}


@pytest.mark.parametrize(
    ("name", "spec", "sentence"),
    [
        ("p", {"sidecar": {"image": "i"}}, "spec.store.url is missing"),
        ("cluster/p", {"store": {"url": "s3://bkt"}}, "spec.sidecar.image is missing"),
        ("p", {"interval": {"goal": {"type": "Auto"}, "min": "2h", "max": "1h"}}, "is above max"),
        ("p", {"interval": {"every": "0s"}}, "every 0s turns the timer off"),
        ("p", {"interval": {"every": "soon"}}, "every is 'soon'; it must be a duration from 0s to 168h"),
        ("p", {"interval": None}, "spec.interval is None; it must be object"),
        ("p", {"arenaSize": True}, "spec.arenaSize is True"),
        ("p", {"cacheSize": 0}, "a quantity of at least 64Mi"),
        ("p", {"keepLast": 0}, "integer with minimum 1"),
        ("p", {"differential": "some"}, "one of full, one-shot"),
        ("p", {"precision": {"tables": {"a=b": "q8"}}}, "encodings by table"),
        ("p", {"sidecar": {"env": [{"name": "A", "value": ""}] * 2}}, "spec.sidecar.env has one name twice"),
        ("p", {"sidecar": {"env": [{"name": "A"}]}}, "spec.sidecar.env.0.value is missing"),
        (
            "p",
            {"store": CLAIM, "sidecar": {"volumes": [AT_MNT]}},
            "sidecar.volumes must not be mounted in /mnt",
        ),
        ("p", {"store": {"url": "s3://bkt\n"}}, "it must be s3://bucket/prefix"),
    ],
)
def test_invalid_policy_is_refused_with_its_name(name: str, spec: dict[str, Any], sentence: str) -> None:
    """The sources are the chart's default, an older definition and the merge."""
    whole = spec if "missing" in sentence else merged(spec, sample.DEFAULTS)
    with pytest.raises(Refusal) as caught:
        read(name, whole)
    assert caught.value.sentence.startswith(f"{workload_policy.display_name(name)}: ")
    assert sentence in caught.value.sentence


def test_annotation_interval_suffices_without_a_policy_interval() -> None:
    defaults = {**sample.DEFAULTS, "interval": {"every": "0s", "everySteps": 9}}
    spec = merged({"interval": {"everySteps": 0}}, defaults)
    assert read("p", spec, Annotations(policy="p", spec=EVERY)).saving.every_s == 60
    with pytest.raises(Refusal, match="every 0s turns the timer off"):
        read("p", spec, Annotations(policy="p", spec={"interval": {"goal": "auto"}}))


def test_cluster_policies_have_distinct_names() -> None:
    assert workload_policy.key_of("team-a", "nightly") == ("team-a", "nightly")
    assert workload_policy.key_of("team-a", "cluster/nightly") == ("", "nightly")
    assert workload_policy.display_name("cluster/p") == "ClusterCheckpointPolicy p"


@pytest.mark.parametrize(
    ("store", "url"),
    [
        (
            {
                "url": "s3://bkt/p",
                "endpoint": "https://s3.example",
                "region": "eu-1",
                "addressing": "virtual",
                "encryption": {"kind": "SSE-KMS", "keyId": "arn:aws:kms:eu-1:1:key/a-b"},
            },
            (
                "s3://bkt/p?endpoint=https://s3.example&region=eu-1&addressing=virtual&sse=aws:kms"
                "&kms-key-id=arn:aws:kms:eu-1:1:key/a-b"
            ),
        ),
        ({"url": "s3://bkt", "encryption": {"kind": "SSE-S3"}, "addressing": "auto"}, "s3://bkt?sse=AES256"),
        ({"url": "gs://bkt_1/p", "endpoint": "http://gcs:4443"}, "gs://bkt_1/p?endpoint=http://gcs:4443"),
        (
            {"url": "az://ctr/p", "account": "acc1", "endpoint": "http://az:10000/acc1"},
            "az://ctr/p?endpoint=http://az:10000/acc1&account=acc1",
        ),
    ],
)
def test_store_spec_becomes_a_sidecar_url(store: dict[str, Any], url: str) -> None:
    assert sample.policy({"store": store}).url == url
    parts = urlsplit(url)
    scheme = scheme_of(parts.scheme)
    assert scheme is not None
    assert set(options_of(parts.query, scheme, url)) <= set(scheme.options)


STORE, TOKEN = "/etc/deltashard/store/", "/var/run/secrets/deltashard/store"


@pytest.mark.parametrize(
    ("store", "variables", "audiences"),
    [
        ({"url": "gs://bkt", "secretRef": {"name": "s"}}, {"GOOGLE_APPLICATION_CREDENTIALS": STORE + "credentials"}, []),
        (
            {"url": "az://ctr", "secretRef": {"name": "s", "key": "azure"}},
            {"AZURE_STORAGE_CONNECTION_STRING_FILE": STORE + "azure"},
            [],
        ),
        (
            {"url": "s3://bkt", "webIdentity": {"audience": "minio", "stsEndpoint": "http://minio:9000"}},
            {"AWS_WEB_IDENTITY_TOKEN_FILE": TOKEN, "AWS_ENDPOINT_URL_STS": "http://minio:9000"},
            ["minio"],
        ),
        (
            {"url": "s3://bkt", "webIdentity": {"roleArn": "arn:aws:iam::1:role/x"}},
            {"AWS_WEB_IDENTITY_TOKEN_FILE": TOKEN, "AWS_ROLE_ARN": "arn:aws:iam::1:role/x"},
            ["sts.amazonaws.com"],
        ),
    ],
)  # fmt: skip
def test_credentials_are_mounted_and_never_in_the_environment(
    store: dict[str, Any], variables: dict[str, str], audiences: list[str]
) -> None:
    """The store uses a Secret, which may be created later, or a token. No environment contains a key."""
    policy = sample.policy({"store": store})
    assert store_access.settings(policy) == variables
    (volume,), (mount,) = store_access.files(policy)
    assert mount["readOnly"]
    sources = volume.get("projected", {}).get("sources", [])
    assert [each["serviceAccountToken"]["audience"] for each in sources] == audiences
    assert volume.get("secret") == (None if audiences else {"secretName": "s", "optional": True})
