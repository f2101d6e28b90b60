"""The Job that runs a command on a run's store has the sidecar's store access and nothing else of its pod."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_cli.kubectl import store_job

RUN = {"metadata": {"name": "train-1", "namespace": "team"}, "spec": {"runId": "train-u"}}
FLEET = {"serviceAccountToken": {"path": "fleet", "audience": "deltashard-fleet"}}
STORE = {"serviceAccountToken": {"path": "store", "audience": "sts.amazonaws.com"}}


def pod(*tokens: dict[str, Any]) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "deltashard-shm", "emptyDir": {"medium": "Memory"}},
        {"name": "deltashard-cache", "emptyDir": {}},
        {"name": "users", "hostPath": {"path": "/"}},
        {"name": "deltashard-token", "projected": {"sources": list(tokens)}},
    ]
    mounts = [
        {"name": each["name"], "mountPath": f"/{each['name']}"} for each in volumes if each["name"] != "users"
    ]
    env = [
        {"name": "DELTASHARD_URL", "value": "s3://bucket"},
        {"name": "DELTASHARD_FLEET", "value": "x:1"},
        {"name": "POD_NAME", "valueFrom": {}},
        {"name": "AWS_ROLE_ARN", "value": "arn"},
    ]
    sidecar = {"name": "deltashard-sidecar", "image": "sidecar:1", "env": env, "volumeMounts": mounts}
    return {"initContainers": [sidecar], "volumes": volumes, "serviceAccountName": "trainers"}


@pytest.mark.parametrize("tokens", [(FLEET, STORE), (STORE,)])
def test_web_identity_token_is_kept_and_controller_token_dropped(
    tokens: tuple[dict[str, Any], ...],
) -> None:
    spec = store_job.manifest(RUN, pod(*tokens), ["rewind", "-c", "seq:3"], name="x")["spec"]["template"][
        "spec"
    ]
    (container,) = spec["containers"]
    assert [each["name"] for each in spec["volumes"]] == ["deltashard-cache", "deltashard-token"]
    assert spec["volumes"][1]["projected"]["sources"] == [STORE]
    assert [each["name"] for each in container["volumeMounts"]] == ["deltashard-cache", "deltashard-token"]
    assert [each["name"] for each in container["env"]] == ["DELTASHARD_URL", "AWS_ROLE_ARN"]
    assert container["command"][3:] == ["--run", "team/train-u", "-c", "seq:3"]
    assert spec["serviceAccountName"] == "trainers"


def test_service_mesh_injection_is_disabled() -> None:
    job = store_job.manifest(RUN, pod(FLEET), ["rewind"], name="x")
    metadata = job["spec"]["template"]["metadata"]
    assert metadata["labels"]["sidecar.istio.io/inject"] == "false"
    assert metadata["annotations"]["linkerd.io/inject"] == "disabled"


def test_a_pod_without_a_sidecar_is_refused() -> None:
    with pytest.raises(UserError, match="no deltashard-sidecar"):
        store_job.manifest(RUN, {"initContainers": []}, ["rewind"], name="x")
