"""The custom resources' schemas, on a real API server: what they take, what they refuse, what kubectl shows."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.api import workload_policy
from deltashard_operator.run import run_record
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.operator.full_run import NOW_S, full_run
from tests.support.server.apiserver import ApiServer, Rest

GOOD_POLICY: dict[str, Any] = {
    "store": {
        "url": "s3://checkpoints/team-a",
        "endpoint": "http://minio.minio.svc:9000",
        "region": "eu-west-1",
        "addressing": "path",
        "encryption": {"kind": "SSE-KMS", "keyId": "alias/checkpoints"},
        "secretName": "store",
        "webIdentity": {
            "audience": "sts.amazonaws.com",
            "roleArn": "arn:aws:iam::123456789012:role/team-a",
            "stsEndpoint": "https://sts.example",
        },
    },
    "interval": {"goal": "overhead=0.5%", "leastSeconds": 60, "mostSeconds": 1800},
    "precision": {
        "goal": "budget",
        "leastBits": 4,
        "tables": {"model.emb.user": "q8", "emb/item": "q4"},
    },
    "intervalSeconds": 300,
    "everySteps": 0,
    "bits": 8,
    "differential": "intermittent",
    "arenaSize": "256Mi",
    "cacheSize": 10737418240,
    "keepLast": 3,
    "gracePeriodSeconds": 120,
    "reclaimPolicy": "Delete",
    "reclaimAfterSeconds": 86400,
    "reclaimServiceAccount": "trainer",
    "sidecar": {
        "image": "registry.example/sidecar:1",
        "imagePullPolicy": "Always",
        "imagePullSecrets": ["pull"],
        "resources": {
            "requests": {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": 0},
            "limits": {"cpu": 2, "memory": "1Gi", "ephemeral-storage": "12Gi"},
        },
        "runAsUser": None,
        "metricsPort": 24464,
        "hostNetworkMetricsPort": 0,
        "env": [{"name": "GOMEMLIMIT", "value": "1GiB"}],
        "volumes": [
            {"name": "a", "configMap": {"name": "files", "optional": True}},
            {"name": "b", "secret": {"secretName": "keys"}},
            {
                "name": "c",
                "projected": {
                    "sources": [
                        {
                            "serviceAccountToken": {
                                "audience": "vault",
                                "expirationSeconds": 600,
                                "path": "token",
                            }
                        },
                        {"configMap": {"name": "files"}},
                        {"secret": {"name": "keys", "optional": False}},
                    ]
                },
            },
            {
                "name": "d",
                "csi": {
                    "driver": "secrets-store.csi.k8s.io",
                    "volumeAttributes": {"secretProviderClass": "store"},
                },
            },
        ],
        "volumeMounts": [{"name": "d", "mountPath": "/etc/keys"}],
    },
    "network": {
        "httpsProxy": "http://proxy.example:3128",
        "httpProxy": "http://proxy.example:3128",
        "noProxy": "minio.example,.internal",
        "caBundle": {"configMap": "authorities", "key": "ca.crt"},
    },
    "fleet": {
        "address": "deltashard-fleet.deltashard-system.svc:9443",
        "ca": "-----BEGIN CERTIFICATE-----\n",
    },
}
"""Every field there is."""
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "both ways of precision": ({"bits": 8, "encoding": "q8"}, "set one of them"),
    "five bits": ({"bits": 5, "encoding": None}, "Unsupported value"),
    "an unknown encoding": ({"bits": None, "encoding": "q7"}, "Unsupported value"),
    "a url with options": ({"store": {"url": "s3://bucket/x?endpoint=evil"}}, "should match"),
    "a url upwards": ({"store": {"url": "s3://bucket/../x"}}, "holds '..'"),
    "an option of S3's for Google": (
        {"store": {"url": "gs://bucket/x", "region": "eu"}},
        "words of s3:// alone",
    ),
    "an account for S3": ({"store": {"url": "s3://bucket/x", "account": "abc"}}, "a word of az:// alone"),
    "a path of an endpoint": (
        {"store": {"url": "gs://bucket/x", "endpoint": "http://h/path"}},
        "has a path for az:// alone",
    ),
    "an identity for Google": (
        {"store": {"url": "gs://bucket/x", "webIdentity": {}}},
        "GKE gives the pod's service account its identity",
    ),
    "a role of AWS for Azure": (
        {
            "store": {
                "url": "az://bucket/x",
                "webIdentity": {"clientId": "c", "tenantId": "t", "roleArn": "r"},
            }
        },
        "roleArn and stsEndpoint are words of s3:// alone",
    ),
    "half an identity of Azure": (
        {"store": {"url": "az://bucket/x", "webIdentity": {"clientId": "c"}}},
        "which needs both",
    ),
    "a client's id for S3": (
        {"store": {"url": "s3://bucket/x", "webIdentity": {"clientId": "c"}}},
        "which needs both",
    ),
    "a key of the store's own keys": (
        {"store": {"url": "s3://bucket/x", "encryption": {"kind": "SSE-S3", "keyId": "k"}}},
        "keyId belongs to kind SSE-KMS",
    ),
    "an unknown encryption": (
        {"store": {"url": "s3://bucket/x", "encryption": {"kind": "SSE-C"}}},
        "Unsupported value",
    ),
    "an unknown addressing": ({"store": {"url": "s3://bucket/x", "addressing": "dns"}}, "Unsupported value"),
    "a variable of ours": (
        {"sidecar": {"env": [{"name": "DELTASHARD_URL", "value": "x"}]}},
        "the sidecar's own",
    ),
    "a home": ({"sidecar": {"env": [{"name": "HOME", "value": "/"}]}}, "the sidecar's own"),
    "a proxy as a variable": (
        {"sidecar": {"env": [{"name": "https_proxy", "value": "http://p:1"}]}},
        "proxies are said by network",
    ),
    "a variable twice": (
        {"sidecar": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "Duplicate value",
    ),
    "a volume of the node": (
        {"sidecar": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}},
        "nothing of the node",
    ),
    "a volume of two kinds": (
        {"sidecar": {"volumes": [{"name": "v", "configMap": {"name": "c"}, "secret": {"secretName": "s"}}]}},
        "a volume is one of",
    ),
    "a volume of our name": (
        {"sidecar": {"volumes": [{"name": "deltashard-shm", "configMap": {"name": "c"}}]}},
        "the sidecar's own",
    ),
    "a mount over ours": (
        {
            "sidecar": {
                "volumes": [{"name": "v", "configMap": {"name": "c"}}],
                "volumeMounts": [{"name": "v", "mountPath": "/etc/deltashard/store"}],
            }
        },
        "in or above one of the sidecar's own",
    ),
    "a mount above ours": (
        {
            "sidecar": {
                "volumes": [{"name": "v", "configMap": {"name": "c"}}],
                "volumeMounts": [{"name": "v", "mountPath": "/run"}],
            }
        },
        "in or above one of the sidecar's own",
    ),
    "a mount of nothing": (
        {
            "sidecar": {
                "volumes": [{"name": "v", "configMap": {"name": "c"}}],
                "volumeMounts": [{"name": "w", "mountPath": "/etc/w"}],
            }
        },
        "names one of volumes",
    ),
    "a proxy with a password": ({"network": {"httpsProxy": "http://user:pw@proxy:1"}}, "should match"),
    "networks past the proxy": (
        {"network": {"httpsProxy": "http://proxy:1", "noProxy": "10.0.0.0/8"}},
        "should match",
    ),
    "past no proxy": ({"network": {"noProxy": "a"}}, "nothing without httpsProxy"),
    "authorities of nowhere": ({"network": {"caBundle": {"key": "ca.crt"}}}, "Required value"),
    "a store without url": ({"store": {"secretName": "store"}}, "Required value"),
    "a negative interval": ({"intervalSeconds": -1}, "greater than or equal to 0"),
    "an interval beyond a week": ({"intervalSeconds": 604801}, "less than or equal to 604800"),
    "no timer at all": ({"intervalSeconds": 0, "everySteps": None}, "it needs everySteps above 0"),
    "no timer and no steps": ({"intervalSeconds": 0, "everySteps": 0}, "it needs everySteps above 0"),
    "steps as text": ({"everySteps": "10"}, "must be of type integer"),
    "a goal that nobody knows": ({"interval": {"goal": "soon"}}, "should match"),
    "a goal without its amount": ({"interval": {"goal": "overhead"}}, "should match"),
    "an overhead of all": ({"interval": {"goal": "overhead=51%"}}, "should match"),
    "an overhead of nothing": ({"interval": {"goal": "overhead=0.0%"}}, "its amount is 0"),
    "no lost work at all": ({"interval": {"goal": "lost-work=0s"}}, "its amount is 0"),
    "a month of lost work": ({"interval": {"goal": "lost-work=30d"}}, "at most 7d"),
    "the same in hours": ({"interval": {"goal": "lost-work=169h"}}, "at most 7d"),
    "the same in milliseconds": ({"interval": {"goal": "lost-work=604800001ms"}}, "at most 7d"),
    "a pls above all": ({"interval": {"goal": "pls=2"}}, "should match"),
    "bounds that cross": (
        {"interval": {"leastSeconds": 60, "mostSeconds": 59}},
        "leastSeconds is above mostSeconds",
    ),
    "a bound beyond a week": ({"interval": {"mostSeconds": 604801}}, "less than or equal to 604800"),
    "a goal of bits that nobody knows": ({"precision": {"goal": "small"}}, "Unsupported value"),
    "five bits at least": ({"precision": {"leastBits": 5}}, "Unsupported value"),
    "a table without a name": ({"precision": {"tables": {"": "q8"}}}, "1 to 253 characters"),
    "a table of an unknown encoding": ({"precision": {"tables": {"emb": "q7"}}}, "Unsupported value"),
    "an unknown differential": ({"differential": "sometimes"}, "Unsupported value"),
    "an arena too small": ({"arenaSize": "63Mi"}, "from 64Mi to 1Ti"),
    "an arena too large": ({"arenaSize": "2Ti"}, "from 64Mi to 1Ti"),
    "an arena that is no quantity": ({"arenaSize": "much"}, "from 64Mi to 1Ti"),
    "a cache too small": ({"cacheSize": 1}, "at least 64Mi"),
    "nothing to keep": ({"keepLast": 0}, "greater than or equal to 1"),
    "no time to save": ({"gracePeriodSeconds": 4}, "greater than or equal to 5"),
    "a reclaim that is neither": ({"reclaimPolicy": "Recycle"}, "Unsupported value"),
    "a grace before the end": ({"reclaimAfterSeconds": -1}, "greater than or equal to 0"),
    "a grace of eleven years": ({"reclaimAfterSeconds": 315360001}, "less than or equal to 315360000"),
    "an account of no name": ({"reclaimServiceAccount": "Trainer!"}, "should match"),
    "root": ({"sidecar": {"runAsUser": 0}}, "greater than or equal to 1"),
    "no processor": ({"sidecar": {"resources": {"limits": {"cpu": "0"}}}}, "above 0"),
    "a port beyond": ({"sidecar": {"metricsPort": 65536}}, "less than or equal to 65535"),
    "an address without a port": ({"fleet": {"address": "host"}}, "should match"),
}


@pytest.fixture
def http(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as http:
        yield http


def policy(change: dict[str, Any] | None = None) -> dict[str, Any]:
    spec = {k: v for k, v in (copy.deepcopy(GOOD_POLICY) | (change or {})).items() if v is not None}
    return {
        "apiVersion": "deltashard.io/v1alpha1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": f"p-{uuid.uuid4().hex[:8]}"},
        "spec": spec,
    }


def run() -> dict[str, Any]:
    return {
        "apiVersion": "deltashard.io/v1alpha1",
        "kind": "CheckpointRun",
        "metadata": {"name": f"r-{uuid.uuid4().hex[:8]}"},
        "spec": {
            "runId": "ctr-1",
            "policy": "default",
            "workload": {"apiVersion": "batch/v1", "kind": "Job", "name": "ctr", "uid": str(uuid.uuid4())},
        },
    }


def root(namespace: str = "default", plural: str = "checkpointruns") -> str:
    return f"/apis/deltashard.io/v1alpha1/namespaces/{namespace}/{plural}"


def test_a_policy_with_every_field_is_stored_as_written_and_read_by_the_injector(http: Rest) -> None:
    reply = http.create(policy())
    assert reply.status == 201, reply.document
    assert reply.warnings == []  # an unknown field would be pruned with a warning or silently
    assert reply.document["spec"] == GOOD_POLICY
    assert workload_policy.read("p", reply.document["spec"]).run_as_user is None


@pytest.mark.parametrize(
    "goal",
    ["auto", "fixed", "overhead=50%", "overhead=0.001%", "lost-work=7d", "lost-work=168h",
     "lost-work=250ms", "lost-work=1.5m", "pls=0.02", "pls=1"],
)  # fmt: skip
def test_a_goal_that_the_api_takes_is_one_that_is_read(http: Rest, goal: str) -> None:
    reply = http.create(policy({"interval": {"goal": goal}}))
    assert reply.status == 201, reply.document
    assert workload_policy.read("p", reply.document["spec"]).goal == goal


def test_the_status_of_a_run_is_taken_as_it_is_written(http: Rest) -> None:
    """Every field that the controller writes is one of the resource's, and comes back as it was."""
    document = run()
    status = run_record.status(full_run(), NOW_S)
    name = http.create(document).document["metadata"]["name"]
    merge = "application/merge-patch+json"
    reply = http("PATCH", f"{root()}/{name}/status?fieldValidation=Strict", {"status": status}, content=merge)
    assert reply.status == 200, reply.document
    assert reply.warnings == []
    assert reply.document["status"] == status


def test_what_a_newer_directive_does_not_state_is_gone_from_the_status(http: Rest) -> None:
    """A field of the older one that stayed would be directed again by the next controller."""
    run_before = full_run()
    asked = pb.Policy(encoding="q4", every_s=0.5, state_encoding="bf16")
    before = run_record.status(run_before, NOW_S)
    after = run_record.status(replace(run_before, directed=asked, generation=4), NOW_S)
    path = f"{root()}/{http.create(run()).document['metadata']['name']}/status?fieldValidation=Strict"
    merge = "application/merge-patch+json"
    assert http("PATCH", path, {"status": before}, content=merge).status == 200
    reply = http("PATCH", path, {"status": run_record.patch(before, after)}, content=merge)
    assert (reply.status, reply.warnings) == (200, [])
    assert reply.document["status"] == after
    assert run_record.run_of(reply.document).directed == asked


def test_an_empty_policy_is_possible_since_the_default_is_under_it(http: Rest) -> None:
    assert http.create(policy(dict.fromkeys(GOOD_POLICY))).status == 201


@pytest.mark.parametrize("name", BAD)
def test_a_policy_with_nonsense_is_refused_before_it_is_stored(http: Rest, name: str) -> None:
    change, says = BAD[name]
    reply = http.create(policy(change))
    assert reply.status == 422
    assert says in reply.document["message"]


def test_strict_clients_hear_of_a_field_that_does_not_exist(http: Rest) -> None:
    reply = http(
        "POST", root(plural="checkpointpolicies") + "?fieldValidation=Strict", policy({"intervals": 3})
    )
    assert reply.status == 400
    assert 'unknown field "spec.intervals"' in reply.document["message"]


def test_a_runs_spec_never_changes_and_its_status_is_a_subresource(http: Rest) -> None:
    created = http.create(run())
    assert created.status == 201, created.document
    path = f"{root()}/{created.document['metadata']['name']}"
    merge = "application/merge-patch+json"
    changed = http("PATCH", path, {"spec": {"runId": "other"}}, content=merge)
    assert (changed.status, "never changes" in changed.document["message"]) == (422, True)
    ignored = http("PATCH", path, {"status": {"phase": "Training"}}, content=merge)
    assert (ignored.status, "status" in ignored.document) == (200, False)
    written = http("PATCH", f"{path}/status", {"status": {"phase": "Training", "step": 7}}, content=merge)
    assert (written.status, written.document["status"]["step"]) == (200, 7)


@pytest.mark.parametrize("missing", ["runId", "policy", "workload"])
def test_a_run_without_an_identity_is_refused(http: Rest, missing: str) -> None:
    document = run()
    del document["spec"][missing]
    assert http.create(document).status == 422


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Sleeping"},
        {"lastCommitTime": "yesterday"},
        {"lostSteps": -1},
        {"finishedReason": "Bored"},
        {"conditions": [{"type": "Ready", "status": "Maybe"}]},
    ],
)
def test_a_status_that_means_nothing_is_refused(http: Rest, status: dict[str, Any]) -> None:
    name = http.create(run()).document["metadata"]["name"]
    merge = "application/merge-patch+json"
    assert http("PATCH", f"{root()}/{name}/status", {"status": status}, content=merge).status == 422


def test_kubectl_get_answers_the_daily_question(http: Rest, apiserver: ApiServer) -> None:
    """The API server itself makes the table that kubectl prints."""
    http.namespace("daily")
    document = run()
    assert http.create(document, "daily").status == 201
    status = {
        "phase": "Training",
        "ranks": "7/8",
        "step": 1200,
        "lastCommittedStep": 1150,
        "lastCommitTime": "2026-01-01T00:00:00Z",
        "intervalSeconds": 300,
        "bits": 8,
        "stored": "1.5Gi",
        "restores": 2,
        "lostSteps": 9,
    }
    path = f"{root('daily')}/{document['metadata']['name']}/status"
    merge = "application/merge-patch+json"
    assert http("PATCH", path, {"status": status}, content=merge).status == 200
    table = http("GET", root("daily"), accept="application/json;as=Table;v=v1;g=meta.k8s.io").document
    columns = [c["name"] for c in table["columnDefinitions"] if c["priority"] == 0]
    assert columns == [
        "Name",
        "Policy",
        "Phase",
        "Ranks",
        "Step",
        "Last-Step",
        "Last-Commit",
        "Interval",
        "Bits",
        "Stored",
        "Restores",
        "Lost",
        "Age",
    ]
    wide = [c["name"] for c in table["columnDefinitions"] if c["priority"]]
    assert {"Goal", "Why", "MTBF"} <= set(wide)
    cells = dict(zip(columns, table["rows"][0]["cells"], strict=False))
    assert cells["Last-Commit"].endswith("d")
    assert {k: cells[k] for k in ("Phase", "Ranks", "Step", "Last-Step", "Stored", "Lost")} == {
        "Phase": "Training",
        "Ranks": "7/8",
        "Step": 1200,
        "Last-Step": 1150,
        "Stored": "1.5Gi",
        "Lost": 9,
    }
