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
            "interval": {"every": "1m", "everySteps": 100},
            "precision": {"encoding": "q4"},
            "differential": "one-shot",
            "arenaSize": "100Mi",
            "cacheSize": "1Gi",
            "keepLast": 5,
            "gracePeriod": "5m",
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
        {"precision": {"encoding": "q8"}},
        encoding="q2",
        every_s=7.5,
        arena_bytes=65 << 20,
        container="c",
        run_id="r",
    )
    assert (policy.encoding, policy.every_s, policy.arena_bytes) == ("q2", 7.5, 72 << 20)
    assert (policy.container, policy.run_id) == ("c", "r")


def test_nothing_is_chosen_where_nothing_says_so() -> None:
    policy = sample.policy({"precision": {"encoding": "q4"}})
    assert (policy.goal, policy.bits_goal, policy.tables) == ("fixed", "", "")


CHOOSING = {
    **sample.DEFAULTS,
    "interval": {"goal": {"type": "Auto"}, "atMost": "15m"},
    "precision": {"goal": "Budget"},
}


@pytest.mark.parametrize(
    ("spec", "annotations", "goals"),
    [
        ({}, {}, ("auto", "budget")),
        ({"interval": {"every": "1m"}}, {}, ("fixed", "budget")),
        ({"interval": {"everySteps": 60}}, {}, ("fixed", "budget")),
        ({"interval": {"every": "1m", "atMost": "15m"}}, {}, ("fixed", "budget")),
        ({"interval": {"every": "1m", "goal": {"type": "Auto"}}}, {}, ("auto", "budget")),
        ({"precision": {"encoding": "q4"}}, {}, ("auto", "")),
        ({"precision": {"encoding": "q4", "goal": "CheckNRun"}}, {}, ("auto", "check-n-run")),
        ({"precision": {"goal": "Fixed"}}, {}, ("auto", "")),
        ({}, {"every_s": 60.0}, ("fixed", "budget")),
        ({}, {"every_s": 60.0, "goal": "auto"}, ("auto", "budget")),
        ({}, {"encoding": "q4"}, ("auto", "")),
        ({}, {"encoding": "q4", "precision": "budget"}, ("auto", "budget")),
        ({"interval": {"every": "1m"}}, {"goal": "lost-work=5m"}, ("lost-work=5m", "budget")),
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
    spec = {
        "deciding": {"enabled": True},
        "interval": {"goal": {"type": "Auto"}},
        "precision": {"goal": "Budget"},
    }
    said = Annotations(policy="p")
    policy = workload_policy.resolve("p", workload_policy.merged(spec, off), said)
    assert (policy.goal, policy.bits_goal) == ("fixed", "")
    on = workload_policy.merged({"deciding": {"enabled": False}}, CHOOSING)
    policy = workload_policy.resolve("p", on, said)
    assert (policy.goal, policy.bits_goal) == ("auto", "budget")


def test_what_becomes_of_a_finished_run_and_whether_the_cluster_lets_it() -> None:
    spec = {"reclaim": {"policy": "Delete", "serviceAccount": "trainer"}, "reclaiming": {"enabled": True}}
    policy = sample.policy(spec)
    assert (policy.reclaim, policy.reclaim_after_s, policy.reclaim_account) == ("Delete", 604800, "trainer")
    assert not policy.reclaims, "no policy's word"
    allowed = {**sample.DEFAULTS, "reclaiming": {"enabled": True}}
    policy = workload_policy.read("p", workload_policy.merged({"reclaim": {"after": "0s"}}, allowed))
    assert (policy.reclaim, policy.reclaim_after_s, policy.reclaims) == ("Retain", 0, True)


def test_encodings_of_tables_that_do_not_fit_beside_the_rest_are_refused() -> None:
    tables = {f"{'x' * 100}{n}": "q8" for n in range(40)}
    with pytest.raises(Refusal, match="at most 3072 characters"):
        sample.policy({"precision": {"tables": tables}})


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"interval": "auto"}, "spec.interval is 'auto'; it takes an object"),
        ({"interval": {"goal": {"type": "Soon"}}}, "spec.interval.goal.type is 'Soon'"),
        ({"interval": {"goal": {"type": "PLS"}}}, "spec.interval.goal: type PLS needs pls"),
        ({"interval": {"atLeast": "60s", "atMost": "59s"}}, "spec.interval.atLeast is '60s'"),
        ({"interval": {"every": True}}, "spec.interval.every is 'True'"),
        ({"interval": {"every": "0s"}}, "spec.interval: every 0s turns the timer off"),
        ({"interval": {"everySteps": True}}, "spec.interval.everySteps is 'True'"),
        ({"precision": {"tables": {"a=b": "q8"}}}, "spec.precision.tables is"),
        ({"precision": {"tables": {"a": "q7"}}}, "spec.precision.tables.a is 'q7'"),
        ({"store": {}}, "spec.store.url is missing"),
        ({"store": {"url": "s3://b/$(NODE_NAME)"}}, "spec.store.url is"),
        ({"store": {"url": "s3://b/p\n"}}, "spec.store.url is"),
        ({"store": {"url": "s3://bkt/../x"}}, "spec.store.url: the url holds '..'"),
        ({"store": {"url": "gs://bkt", "region": "eu"}}, "spec.store: region, addressing and encryption"),
        (
            {"store": {"url": "az://ctr", "webIdentity": {"clientId": "c"}}},
            "spec.store: webIdentity needs clientId",
        ),
        ({"store": "s3://bucket"}, "spec.store is 's3://bucket'"),
        ({"intervalSeconds": 60}, "spec.intervalSeconds: there is no such field"),
        ({"arenaSize": "1Mi"}, "spec.arenaSize is '1Mi'; it takes a quantity from 64Mi to 1Ti"),
        ({"cacheSize": []}, "spec.cacheSize is"),
        ({"sidecar": {"image": ""}}, "spec.sidecar.image is"),
        ({"sidecar": {"imagePullSecrets": [{"name": "x"}]}}, "spec.sidecar.imagePullSecrets[0] is"),
        ({"sidecar": {"resources": {"requests": {"cpu": "0"}}}}, "spec.sidecar.resources.requests.cpu is"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(spec: dict[str, Any], path: str) -> None:
    """The sentence names policy and field, shows the value and says what it takes."""
    with pytest.raises(Refusal) as caught:
        sample.policy(spec)
    assert caught.value.code == "BadPolicy"
    assert caught.value.sentence.startswith(f"CheckpointPolicy default: {path}")


def test_the_cluster_s_policies_are_named_apart() -> None:
    assert workload_policy.key_of("team-a", "nightly") == ("team-a", "nightly")
    assert workload_policy.key_of("team-a", "cluster/nightly") == ("", "nightly")
    with pytest.raises(Refusal, match=r"spec\.store\.url is missing \[ClusterCheckpointPolicy p\]"):
        workload_policy.read("cluster/p", {})
    said = workload_policy.not_found("cluster/nightly", default=False).sentence
    assert "there is no ClusterCheckpointPolicy 'nightly'; create it" in said


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
