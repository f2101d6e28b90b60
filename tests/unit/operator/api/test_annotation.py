"""Annotations: accepted values, and messages for refused values."""

from __future__ import annotations

import pytest
from deltashard_operator.api import annotation
from deltashard_operator.api.annotation import KEYS, Annotations
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.cluster_name import PREFIX

OPT_IN = {PREFIX + "policy": "p"}


def test_every_annotation_is_parsed() -> None:
    by_key = {
        "policy": "p",
        "container": "c",
        "run-id": "r-1",
        "runs": "per-pod",
        "arena-size": "1.5Gi",
        "interval": "1h30m",
        "goal": "lost-work=1m30s",
        "encoding": "q4",
        "precision": "budget",
        "restore-from": "exp-0b4f@best:1",
    }
    notes = {PREFIX + key: value for key, value in by_key.items()}
    assert set(notes) == set(KEYS)
    assert annotation.read(notes, {PREFIX + "injected": "x", "other.io/bits": "9"}) == Annotations(
        policy="p",
        container="c",
        run_id="r-1",
        runs="per-pod",
        restore_from="exp-0b4f@best:1",
        spec={
            "arenaSize": "1.5Gi",
            "interval": {"every": "1h30m", "goal": "lost-work=90s"},
            "precision": {"encoding": "q4", "goal": "budget"},
        },
    )


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("policy", ["", "Upper", "../x", "cluster/", "team-b/x", "cluster/" + "x" * 246]),
        ("restore-from", ["team-b/exp", "exp@", "exp@$(POD_NAME)", "exp@the best", "own@best"]),
        ("container", ["a_b"]),
        ("run-id", ["a/b", "a.b", "-a", "x" * 64, "$(POD_NAME)"]),
        ("runs", ["two"]),
        ("arena-size", ["32Mi", "2Ti", "lots", "-1Gi"]),
        ("interval", ["-5", "soon", "5 m", "169h", "90", "1.5s", "1d"]),
        ("encoding", ["8", "q5", "q8 "]),
        ("goal", ["soon", "overhead=0%", "lost-work=169h", "lost-work=1d", "lost-work=0s"]),
        ("precision", ["", "off"]),
    ],
)
def test_invalid_value_is_refused_with_an_explanation(key: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(Refusal) as caught:
            annotation.read(OPT_IN | {PREFIX + "run-id": "own"} | {PREFIX + key: value})
        sentence = f"deltashard.io/{key}: {value[:80]!r} is not valid; it must be {KEYS[PREFIX + key][2]}"
        assert caught.value.sentence == f"{sentence} (BadAnnotation)"


def test_unknown_key_is_refused_with_the_known_keys() -> None:
    with pytest.raises(Refusal, match="no such annotation") as caught:
        annotation.read(OPT_IN | {PREFIX + "intervall": "5m"})
    assert all(key in caught.value.sentence for key in KEYS)


def test_job_and_template_may_agree_but_not_differ() -> None:
    template = OPT_IN | {PREFIX + "encoding": "q8"}
    assert annotation.read(OPT_IN, template).spec == {"precision": {"encoding": "q8"}}
    with pytest.raises(Refusal, match="it is 'p' on the workload and 'q' on its pod template"):
        annotation.read(OPT_IN, {PREFIX + "policy": "q"})
