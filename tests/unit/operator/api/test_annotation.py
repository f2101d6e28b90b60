"""Annotations: what is taken, and the sentences of what is not."""

from __future__ import annotations

import pytest
from deltashard_operator.api import annotation
from deltashard_operator.api.annotation import TAKES
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.cluster_name import PREFIX

MIB = 1 << 20


def read(**keys: str) -> annotation.Annotations:
    return annotation.read({PREFIX + key.replace("_", "-"): value for key, value in keys.items()})


def test_every_key_is_read() -> None:
    """All keys at once, each in its own unit."""
    found = read(
        policy="p",
        container="c",
        run_id="r-1",
        arena_size="1.5Gi",
        interval="5m",
        goal="overhead=1%",
        encoding="q4",
        precision="budget",
        restore_from="exp-0b4f@best:1",
    )
    assert found == annotation.Annotations(
        policy="p",
        container="c",
        run_id="r-1",
        arena_bytes=1536 * MIB,
        every_s=300.0,
        goal="overhead=1%",
        encoding="q4",
        precision="budget",
        restore_from="exp-0b4f@best:1",
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("0s", 0), ("1s500ms", 1.5), ("1h30m", 5400), ("2h", 7200), ("168h", 604800)],
)
def test_intervals(text: str, seconds: float) -> None:
    assert read(policy="p", interval=text).every_s == seconds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy", ""),
        ("policy", "Upper"),
        ("policy", "../x"),
        ("policy", "cluster/"),
        ("policy", "team-b/x"),
        ("policy", "cluster/" + "x" * 246),
        ("restore-from", "team-b/exp"),
        ("restore-from", "exp@"),
        ("restore-from", "exp@$(POD_NAME)"),
        ("restore-from", "exp@the best"),
        ("container", "a_b"),
        ("run-id", "a/b"),
        ("run-id", "a.b"),
        ("run-id", "-a"),
        ("run-id", "x" * 64),
        ("run-id", "$(POD_NAME)"),
        ("arena-size", "32Mi"),
        ("arena-size", "2Ti"),
        ("arena-size", "lots"),
        ("arena-size", "-1Gi"),
        ("interval", "-5"),
        ("interval", "soon"),
        ("interval", "5 m"),
        ("interval", "169h"),
        ("interval", "90"),
        ("interval", "1.5s"),
        ("interval", "1d"),
        ("encoding", "8"),
        ("encoding", "q5"),
        ("encoding", "q8 "),
        ("goal", "soon"),
        ("goal", "overhead=0%"),
        ("goal", "lost-work=169h"),
        ("goal", "lost-work=1d"),
        ("precision", ""),
        ("precision", "off"),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence(key: str, value: str) -> None:
    """The sentence names the key, shows the value and says what the key takes."""
    with pytest.raises(Refusal) as caught:
        annotation.read({PREFIX + "policy": "p", PREFIX + key: value})
    assert caught.value.code == "BadAnnotation"
    sentence = caught.value.sentence
    assert sentence.startswith(f"deltashard.io/{key}: {value[:80]!r} is not possible; it takes ")
    assert TAKES[PREFIX + key] in sentence


def test_no_run_begins_with_its_own_checkpoint() -> None:
    with pytest.raises(Refusal, match="the run id of another run"):
        read(policy="p", run_id="exp", restore_from="exp@best")


def test_an_unknown_key_is_refused_and_told_the_known_ones() -> None:
    """A misspelled key must not train without what it meant."""
    with pytest.raises(Refusal, match="no such annotation") as caught:
        read(policy="p", intervall="5m")
    assert all(key in caught.value.sentence for key in TAKES)


def test_other_peoples_annotations_and_our_marker_are_not_ours_to_judge() -> None:
    """Only our prefix is read."""
    assert (
        annotation.read({PREFIX + "policy": "p", PREFIX + "injected": "x", "other.io/bits": "9"}).policy
        == "p"
    )


def test_job_and_template_may_agree_but_not_differ() -> None:
    """Annotations may stand on both; a contradiction is refused."""
    job, template = {PREFIX + "policy": "p"}, {PREFIX + "policy": "p", PREFIX + "encoding": "q8"}
    assert annotation.read(job, template).encoding == "q8"
    with pytest.raises(Refusal, match="the workload says 'p' and its pod template says 'q'"):
        annotation.read(job, {PREFIX + "policy": "q"})


def test_opting_in_is_the_policy_key_alone() -> None:
    """No other key opts in, and a missing map is no error."""
    assert annotation.opted_in(None, {PREFIX + "policy": "p"})
    assert not annotation.opted_in(None, {}, {PREFIX + "encoding": "q8"})
    with pytest.raises(Refusal, match="it is missing"):
        read(encoding="q8")
