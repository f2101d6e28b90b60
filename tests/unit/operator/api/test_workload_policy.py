"""Policies: defaults under them, annotations over them, sentences for what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.api import workload_policy
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.refusal import Refusal

from tests.support.operator import sample


def test_a_whole_policy_is_read() -> None:
    """Every field arrives where it belongs."""
    policy = sample.policy(
        {
            "store": {
                "url": "s3://bkt/p",
                "region": "eu-1",
                "endpoint": "https://s3.example",
                "webIdentity": {"roleArn": "arn:aws:iam::1:role/x"},
            },
            "intervalSeconds": 60,
            "everySteps": 100,
            "bits": 4,
            "differential": "one-shot",
            "arenaSize": "100Mi",
            "cacheSize": "1Gi",
            "keepLast": 5,
            "gracePeriodSeconds": 300,
            "sidecar": {
                "imagePullPolicy": "Always",
                "runAsUser": None,
                "resources": {
                    "requests": {"cpu": "1", "memory": "256Mi"},
                    "limits": {"cpu": "3", "memory": "2Gi"},
                },
            },
        }
    )
    assert policy.url == "s3://bkt/p?endpoint=https://s3.example&region=eu-1"
    assert policy.secret_name is None, "the default's secret is not for another store"
    assert policy.web_identity is not None
    assert policy.web_identity.audience == "sts.amazonaws.com"
    assert policy.arena_bytes == 104 << 20, "whole blocks"
    assert policy.image == "registry.example/deltashard-sidecar:0.1.0"
    assert policy.fleet
    assert (policy.encoding, policy.run_as_user, policy.grace_s, policy.cpu_limit_millis) == (
        "q4",
        None,
        300,
        3000,
    )


def test_annotations_win() -> None:
    """The user's word for one workload stands over its policy."""
    policy = sample.policy(
        {"bits": 8}, encoding="q2", every_s=7.5, arena_bytes=65 << 20, container="c", run_id="r"
    )
    assert (policy.encoding, policy.every_s, policy.arena_bytes) == ("q2", 7.5, 72 << 20)
    assert (policy.container, policy.run_id) == ("c", "r")


def test_a_policys_encoding_is_not_mixed_with_the_defaults_bits() -> None:
    """Two ways to say one thing are one field."""
    merged = workload_policy.merged({"bits": 4}, {**sample.DEFAULTS, "encoding": "fp32"})
    assert workload_policy.read("p", merged).encoding == "q4"


def test_nothing_is_chosen_where_nothing_says_so() -> None:
    policy = sample.policy({"bits": 4})
    assert (policy.goal, policy.bits_goal, policy.tables) == ("fixed", "", "")


CHOOSING = {
    **sample.DEFAULTS,
    "interval": {"goal": "auto", "mostSeconds": 900},
    "precision": {"goal": "budget"},
}


@pytest.mark.parametrize(
    ("spec", "annotations", "goals"),
    [
        ({}, {}, ("auto", "budget")),
        ({"intervalSeconds": 60}, {}, ("fixed", "budget")),
        ({"everySteps": 60}, {}, ("fixed", "budget")),
        ({"intervalSeconds": 60, "interval": {"mostSeconds": 900}}, {}, ("fixed", "budget")),
        ({"intervalSeconds": 60, "interval": {"goal": "auto"}}, {}, ("auto", "budget")),
        ({"bits": 4}, {}, ("auto", "")),
        ({"encoding": "q4", "precision": {"goal": "check-n-run"}}, {}, ("auto", "check-n-run")),
        ({"precision": {"goal": "fixed"}}, {}, ("auto", "")),
        ({}, {"every_s": 60.0}, ("fixed", "budget")),
        ({}, {"every_s": 60.0, "goal": "auto"}, ("auto", "budget")),
        ({}, {"encoding": "q4"}, ("auto", "")),
        ({}, {"encoding": "q4", "precision": "budget"}, ("auto", "budget")),
        ({"intervalSeconds": 60}, {"goal": "lost-work=5m"}, ("lost-work=5m", "budget")),
        ({}, {"goal": "fixed", "precision": "fixed"}, ("fixed", "")),
    ],
)
def test_who_states_a_value_and_no_goal_wants_just_this(
    spec: dict[str, Any], annotations: dict[str, Any], goals: tuple[str, str]
) -> None:
    """Whatever the default's goal is; the default's bounds stay."""
    said = Annotations(policy="p", **annotations)
    policy = workload_policy.resolve("p", workload_policy.merged(spec, CHOOSING), said)
    assert ((policy.goal, policy.bits_goal), policy.most_s) == (goals, 900)


def test_the_cluster_turns_deciding_off_and_no_policy_turns_it_on() -> None:
    off = {**CHOOSING, "deciding": {"enabled": False}}
    spec = {"deciding": {"enabled": True}, "interval": {"goal": "auto"}, "precision": {"goal": "budget"}}
    said = Annotations(policy="p")
    policy = workload_policy.resolve("p", workload_policy.merged(spec, off), said)
    assert (policy.goal, policy.bits_goal) == ("fixed", "")
    on = workload_policy.merged({"deciding": {"enabled": False}}, CHOOSING)
    policy = workload_policy.resolve("p", on, said)
    assert (policy.goal, policy.bits_goal) == ("auto", "budget")


def test_what_becomes_of_a_finished_run_and_whether_the_cluster_lets_it() -> None:
    spec = {"reclaimPolicy": "Delete", "reclaimServiceAccount": "trainer", "reclaiming": {"enabled": True}}
    policy = sample.policy(spec)
    assert (policy.reclaim, policy.reclaim_after_s, policy.reclaim_account) == ("Delete", 604800, "trainer")
    assert not policy.reclaims, "no policy's word"
    allowed = {**sample.DEFAULTS, "reclaiming": {"enabled": True}}
    policy = workload_policy.read("p", workload_policy.merged({"reclaimAfterSeconds": 0}, allowed))
    assert (policy.reclaim, policy.reclaim_after_s, policy.reclaims) == ("Retain", 0, True)


def test_encodings_of_tables_that_do_not_fit_beside_the_rest_are_refused() -> None:
    tables = {f"{'x' * 100}{n}": "q8" for n in range(40)}
    with pytest.raises(Refusal, match="at most 3072 characters"):
        sample.policy({"precision": {"tables": tables}})


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"interval": "auto"}, "spec.interval is no object"),
        ({"interval": {"goal": "soon"}}, "spec.interval.goal is 'soon'"),
        ({"interval": {"goal": 5}}, "spec.interval.goal is '5'"),
        ({"interval": {"leastSeconds": 60, "mostSeconds": 59}}, "spec.interval.leastSeconds is '60'"),
        ({"precision": {"goal": "small"}}, "spec.precision.goal is 'small'"),
        ({"precision": {"leastBits": 5}}, "spec.precision.leastBits is '5'"),
        ({"precision": {"tables": {"a=b": "q8"}}}, "spec.precision.tables is"),
        ({"precision": {"tables": {"a": "q7"}}}, "spec.precision.tables is"),
        ({"precision": {"tables": ["a"]}}, "spec.precision.tables is"),
        ({"store": {}}, "spec.store.url is missing"),
        ({"store": {"url": "s3://key:secret@b/p"}}, "spec.store.url is"),
        ({"store": {"url": "file:///data"}}, "spec.store.url is"),
        ({"store": {"url": "s3://b/../x"}}, "spec.store.url is"),
        ({"store": {"url": "s3://b/$(NODE_NAME)"}}, "spec.store.url is"),
        ({"store": {"url": "s3://bucket", "endpoint": "minio:9000"}}, "spec.store.endpoint is"),
        ({"store": {"url": "s3://bucket", "secretName": "Not A Name"}}, "spec.store.secretName is"),
        ({"store": "s3://bucket"}, "spec.store is no object"),
        ({"bits": 5}, "spec.bits is '5'"),
        ({"encoding": "q9"}, "spec.encoding is 'q9'"),
        ({"differential": "some"}, "spec.differential is 'some'"),
        ({"intervalSeconds": -1}, "spec.intervalSeconds is"),
        ({"intervalSeconds": True}, "spec.intervalSeconds is"),
        ({"intervalSeconds": 0}, "spec.intervalSeconds is"),
        ({"everySteps": "10"}, "spec.everySteps is"),
        ({"arenaSize": "1Mi"}, "spec.arenaSize is"),
        ({"cacheSize": []}, "spec.cacheSize is"),
        ({"keepLast": 0}, "spec.keepLast is"),
        ({"reclaimPolicy": "Recycle"}, "spec.reclaimPolicy is 'Recycle'"),
        ({"reclaimAfterSeconds": -1}, "spec.reclaimAfterSeconds is"),
        ({"reclaimServiceAccount": "A"}, "spec.reclaimServiceAccount is 'A'"),
        ({"sidecar": {"image": ""}}, "spec.sidecar.image is"),
        ({"sidecar": {"imagePullPolicy": "Maybe"}}, "spec.sidecar.imagePullPolicy is"),
        ({"sidecar": {"runAsUser": 0}}, "spec.sidecar.runAsUser is"),
        ({"sidecar": {"imagePullSecrets": [{"name": "x"}]}}, "spec.sidecar.imagePullSecrets is"),
        ({"sidecar": {"resources": {"requests": {"cpu": "0"}}}}, "spec.sidecar.resources.requests.cpu is"),
        ({"fleet": {"address": "nowhere"}}, "spec.fleet.address is"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(spec: dict[str, Any], path: str) -> None:
    """The sentence names policy and field, shows the value and says what it takes."""
    with pytest.raises(Refusal) as caught:
        sample.policy(spec)
    assert caught.value.code == "BadPolicy"
    assert caught.value.sentence.startswith(f"CheckpointPolicy default: {path}")


def test_without_any_store_the_policy_says_so() -> None:
    """A chart without a default store needs policies with one."""
    with pytest.raises(Refusal, match="spec.store.url is missing"):
        workload_policy.resolve("p", {"sidecar": {"image": "i"}}, Annotations(policy="p"))


@pytest.mark.parametrize(
    ("spec", "arena_bytes", "cache_bytes"),
    [
        ({}, None, 4 << 30),
        ({"arenaSize": "64Mi"}, None, 1 << 30),
        ({}, 128 << 20, 2 << 30),
        ({"arenaSize": "64Gi"}, None, 10 << 30),
        ({"arenaSize": "64Mi", "cacheSize": "100Gi"}, None, 100 << 30),
        ({"cacheSize": "64Mi"}, 1 << 30, 64 << 20),
    ],
)
def test_the_cache_is_as_large_as_stated_or_in_proportion_to_the_arena(
    spec: dict[str, Any], arena_bytes: int | None, cache_bytes: int
) -> None:
    """A node that has little to spare is not asked for 10 GiB by a small arena; nobody is asked for more than that."""
    assert sample.policy(spec, arena_bytes=arena_bytes).cache_bytes == cache_bytes
