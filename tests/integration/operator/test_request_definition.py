"""The schema of CheckpointRequests on a real API server: accepted and rejected objects, and kubectl's output."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from deltashard_operator.run import request as requests
from deltashard_operator.run.request import RequestFacts

from tests.support.server.apiserver import Rest

MERGE = "application/merge-patch+json"
RUN = {"name": "train-0b4f3c1e"}
GOOD = {"runRef": RUN, "urgent": True, "pin": "before_new.data-1", "deadline": "1h30m"}
ROOT = "/apis/deltashard.io/v1alpha1/namespaces/{}/checkpointrequests"


def asked(spec: Any) -> dict[str, Any]:
    metadata = {"name": f"r-{uuid.uuid4().hex[:8]}"}
    kind = {"apiVersion": "deltashard.io/v1alpha1", "kind": "CheckpointRequest"}
    return {**kind, "metadata": metadata, **({} if spec is None else {"spec": spec})}


def test_every_field_is_accepted_and_defaults_apply(http: Rest) -> None:
    reply = http.create(asked(GOOD))
    assert (reply.status, reply.warnings, reply.document["spec"]) == (201, [], GOOD)
    spec = http.create(asked({"runRef": RUN})).document["spec"]
    assert spec == {"runRef": RUN, "urgent": False, "deadline": "10m"}


NAMES = "the name of a CheckpointRun or a run id"
PINS = "letters, digits and any of ._- between them"
DEADLINES = "a duration from 10s to 24h, such as 90s, 5m or 1h30m"
BAD: dict[str, tuple[Any, str]] = {
    "nothing": (None, "spec: Required value"),
    "no run": ({}, "spec.runRef: Required value"),
    "a run without a name": ({"runRef": {}}, "spec.runRef.name: Required value"),
    "a run as a string": ({"runRef": "train"}, "must be of type object"),
    "an empty name": ({"runRef": {"name": ""}}, NAMES),
    "an invalid name": ({"runRef": {"name": "Train!"}}, NAMES),
    "a name that is too long": ({"runRef": {"name": "a" * 254}}, "Too long"),
    "urgent as a string": ({"runRef": RUN, "urgent": "yes"}, "must be of type boolean"),
    "an empty pin": ({"runRef": RUN, "pin": ""}, PINS),
    "a pin with spaces": ({"runRef": RUN, "pin": "best one"}, PINS),
    "a pin that ends with a dot": ({"runRef": RUN, "pin": "best."}, PINS),
    "a pin that is too long": ({"runRef": RUN, "pin": "a" * 254}, "Too long"),
    "a deadline as a number": ({"runRef": RUN, "deadline": 300}, "must be of type string"),
    "a deadline without a unit": ({"runRef": RUN, "deadline": "300"}, DEADLINES),
    "a deadline in days": ({"runRef": RUN, "deadline": "1d"}, DEADLINES),
    "a deadline below the minimum": ({"runRef": RUN, "deadline": "9s"}, DEADLINES),
    "a deadline above the maximum": ({"runRef": RUN, "deadline": "24h1s"}, DEADLINES),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_field_is_refused_with_message(http: Rest, name: str) -> None:
    spec, message = BAD[name]
    reply = http.create(asked(spec))
    assert reply.status == 422
    assert message in reply.document["message"]


def test_spec_is_immutable_and_status_is_stored_unchanged(http: Rest) -> None:
    """The resource has every field that the controller writes, and kubectl shows the outcome."""
    http.namespace("asked")
    made = http.create(asked(GOOD), "asked").document
    path = f"{ROOT.format('asked')}/{made['metadata']['name']}"
    changed = http("PATCH", path, {"spec": {"pin": "other"}}, content=MERGE)
    assert changed.status == 422
    assert "a CheckpointRequest's spec never changes; create another one" in changed.document["message"]
    failed = requests.reconcile(requests.request_of(made), RequestFacts(now_s=2e9))
    status = requests.status(failed)
    reply = http("PATCH", f"{path}/status?fieldValidation=Strict", {"status": status}, content=MERGE)
    assert (reply.status, reply.warnings, reply.document["status"]) == (200, [], status)
    table = http("GET", ROOT.format("asked"), accept="application/json;as=Table;v=v1;g=meta.k8s.io").document
    columns = [each["name"] for each in table["columnDefinitions"] if each["priority"] == 0]
    cells = dict(zip(columns, table["rows"][0]["cells"], strict=False))
    assert columns == ["Name", "Run", "Phase", "Step", "Pin", "Age", "Message"]
    assert (cells["Run"], cells["Phase"], cells["Pin"]) == (RUN["name"], "Failed", GOOD["pin"])
    assert cells["Message"].startswith("in 1h30m there was no run train-0b4f3c1e")
