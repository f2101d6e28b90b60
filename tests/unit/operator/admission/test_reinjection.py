"""Manifests copied from injected ones: as it was said, or refused; never another run or policy than the copy says."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.operator import sample

OWNER = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "online", "uid": "u-1", "controller": True}


def job(**notes: str) -> dict[str, Any]:
    said = {f"deltashard.io/{key.replace('_', '-')}": value for key, value in notes.items()}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "exp", "annotations": {"deltashard.io/policy": "default", **said}},
        "spec": {"template": sample.template()},
    }


def injected(document: dict[str, Any]) -> dict[str, Any]:
    return sample.applied(document, sample.answer(document))


def refusal(document: dict[str, Any]) -> str:
    response = sample.answer(document)
    assert not response["allowed"]
    assert response["status"]["reason"] == "CopiedManifest"
    message: str = response["status"]["message"]
    assert "take the container deltashard-sidecar" in message
    return message


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"run_id": "exp"},
        {"restore_from": "exp@best"},
        {"interval": "1s500ms", "encoding": "q4", "arena_size": "100Mi"},
    ],
)
def test_what_is_as_it_was_said_is_let_through(notes: dict[str, str]) -> None:
    """The webhook is called again when another one changed something behind it."""
    document = injected(job(**notes))
    again = sample.answer(document)
    assert again["allowed"]
    assert "patch" not in again


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run-id", "other"),
        ("interval", "60s"),
        ("encoding", "q2"),
        ("arena-size", "512Mi"),
        ("restore-from", "base"),
    ],
)
def test_another_word_than_the_sidecars_is_refused(key: str, value: str) -> None:
    document = injected(job(run_id="exp", interval="1s500ms", encoding="q4", arena_size="100Mi"))
    document["metadata"]["annotations"][f"deltashard.io/{key}"] = value
    assert f"deltashard.io/{key}: " in refusal(document)


def test_a_run_id_that_was_taken_out_is_refused_too() -> None:
    """It would go on with the older run under a manifest that asks for a new one."""
    document = injected(job(run_id="exp"))
    del document["metadata"]["annotations"]["deltashard.io/run-id"]
    assert "deltashard.io/run-id: " in refusal(document)


def test_another_policy_is_refused() -> None:
    document = injected(job())
    for metadata in (document["metadata"], document["spec"]["template"]["metadata"]):
        metadata["annotations"]["deltashard.io/policy"] = "nightly"
    assert "deltashard.io/policy: " in refusal(document)


def test_a_pod_that_was_copied_from_a_workloads_is_refused() -> None:
    """It has its StatefulSet's name and UID in its environment, and would train into that one's run."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        **sample.template(),
        "metadata": {
            "name": "online-0",
            "annotations": {"deltashard.io/policy": "default"},
            "ownerReferences": [OWNER],
        },
    }
    mine = injected(pod)
    assert sample.answer(mine)["allowed"]
    copied = copy.deepcopy(mine)
    del copied["metadata"]["ownerReferences"]
    assert "another workload" in refusal(copied)
    copied["metadata"]["ownerReferences"] = [OWNER | {"name": "offline", "uid": "u-2"}]
    assert "another workload" in refusal(copied)


def test_a_jobs_pod_template_in_a_pod_is_refused() -> None:
    document = injected(job())
    template = document["spec"]["template"]
    metadata = {**template["metadata"], "name": "copy"}
    assert "another workload" in refusal(
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}
    )
