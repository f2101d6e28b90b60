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
        "secretRef": {"name": "store", "key": "aws"},
        "webIdentity": {
            "audience": "sts.amazonaws.com",
            "roleArn": "arn:aws:iam::123456789012:role/team-a",
            "stsEndpoint": "https://sts.example",
        },
    },
    "interval": {
        "every": "5m",
        "everySteps": 0,
        "goal": {"type": "Overhead", "overhead": "0.5%"},
        "atLeast": "1m",
        "atMost": "30m",
    },
    "precision": {
        "encoding": "q8",
        "goal": "Budget",
        "leastBits": 4,
        "tables": {"model.emb.user": "q8", "emb/item": "q4"},
    },
    "differential": "intermittent",
    "arenaSize": "256Mi",
    "cacheSize": 10737418240,
    "keepLast": 3,
    "gracePeriod": "2m",
    "reclaim": {"policy": "Delete", "after": "24h", "serviceAccount": "trainer"},
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
            {"name": "a", "mountPath": "/etc/a", "configMap": {"name": "files", "optional": True}},
            {"name": "b", "mountPath": "/etc/b", "secret": {"secretName": "keys"}},
            {
                "name": "c",
                "mountPath": "/var/lib/c",
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
                "mountPath": "/etc/keys",
                "csi": {
                    "driver": "secrets-store.csi.k8s.io",
                    "volumeAttributes": {"secretProviderClass": "store"},
                },
            },
        ],
    },
    "network": {
        "httpsProxy": "http://proxy.example:3128",
        "httpProxy": "http://proxy.example:3128",
        "noProxy": "minio.example,.internal",
        "caBundle": {"configMap": "authorities", "key": "ca.crt"},
    },
}
"""Every field there is."""


def volume(**fields: Any) -> dict[str, Any]:
    good = {"name": "v", "mountPath": "/etc/v", "configMap": {"name": "c"}}
    found = {key: value for key, value in (good | fields).items() if value is not None}
    return {"sidecar": {"volumes": [found]}}


def s3(**fields: Any) -> dict[str, Any]:
    return {"store": {"url": "s3://bucket/x", **fields}}


def mounted(**fields: Any) -> dict[str, Any]:
    return {"store": {"url": "file:///mnt/shared/x", "claim": "checkpoints", **fields}, "sidecar": None}


def goal(**fields: Any) -> dict[str, Any]:
    return {"interval": {"goal": fields}}


A_DURATION = "such as 90s, 5m or 1h30m"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown encoding": ({"precision": {"encoding": "q7"}}, "supported values"),
    "a url with options": ({"store": {"url": "s3://bucket/x?endpoint=evil"}}, "it takes s3://bucket/prefix"),
    "a url upwards": ({"store": {"url": "s3://bucket/../x"}}, "holds '..'"),
    "a store without url": ({"store": {"secretRef": {"name": "store"}}}, "Required value"),
    "an endpoint without a scheme": (s3(endpoint="minio:9000"), "it takes http(s)://host:port"),
    "a directory of the sidecar's own": (mounted(url="file:///var/cache/x"), "or file:///mnt/NAME/prefix"),
    "a directory of all claims": (mounted(url="file:///mnt/"), "or file:///mnt/NAME/prefix"),
    "a directory without a claim": (
        {"store": {"url": "file:///mnt/shared"}},
        "file:///mnt/NAME needs claim, the PersistentVolumeClaim",
    ),
    "a claim for S3": (s3(claim="checkpoints"), "claim is a word of file:///mnt/NAME alone"),
    "a claim of no name": (mounted(claim="Not A Name"), "the name of an object"),
    "a claim with a Secret": (mounted(secretRef={"name": "s"}), "which takes no credentials"),
    "a claim with an identity": (mounted(webIdentity={}), "which takes no credentials"),
    "a claim with an endpoint": (mounted(endpoint="http://h"), "which takes no credentials"),
    "a claim with a region": (mounted(region="eu"), "words of s3:// alone"),
    "a volume over the claim": (
        mounted() | volume(mountPath="/mnt/shared/x"),
        "sidecar.volumes lie elsewhere than in /mnt",
    ),
    "an option of S3's for Google": (
        {"store": {"url": "gs://bucket/x", "region": "eu"}},
        "words of s3:// alone",
    ),
    "an account for S3": (s3(account="abc"), "a word of az:// alone"),
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
        "needs clientId and tenantId",
    ),
    "a client's id for S3": (s3(webIdentity={"clientId": "c"}), "words of az:// alone"),
    "a key of the store's own keys": (
        s3(encryption={"kind": "SSE-S3", "keyId": "k"}),
        "keyId belongs to kind SSE-KMS",
    ),
    "a key of no name": (s3(encryption={"kind": "SSE-KMS", "keyId": "a b"}), "the id, alias or ARN of a key"),
    "an unknown encryption": (s3(encryption={"kind": "SSE-C"}), "supported values"),
    "an unknown addressing": (s3(addressing="dns"), "supported values"),
    "a Secret of no name": (s3(secretRef={"name": "Not A Name"}), "the name of an object"),
    "a Secret's key with a path": (s3(secretRef={"name": "s", "key": "../x"}), "a file's name"),
    "a variable of ours": (
        {"sidecar": {"env": [{"name": "DELTASHARD_URL", "value": "x"}]}},
        "the sidecar's own",
    ),
    "a home": ({"sidecar": {"env": [{"name": "HOME", "value": "/"}]}}, "the sidecar's own"),
    "a variable of no name": ({"sidecar": {"env": [{"name": "1A", "value": "x"}]}}, "a variable's name"),
    "a proxy as a variable": (
        {"sidecar": {"env": [{"name": "https_proxy", "value": "http://p:1"}]}},
        "proxies are said by network",
    ),
    "a variable twice": (
        {"sidecar": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "Duplicate value",
    ),
    "a volume of the node": (volume(configMap=None, hostPath={"path": "/"}), "nothing of the node"),
    "a volume of two kinds": (volume(secret={"secretName": "s"}), "a volume is one of"),
    "a volume of our name": (volume(name="deltashard-shm"), "the sidecar's own"),
    "a volume that lies nowhere": (volume(mountPath=None), "Required value"),
    "a volume over ours": (volume(mountPath="/etc/deltashard/store"), "in or above one of the sidecar's own"),
    "a volume above ours": (volume(mountPath="/run"), "in or above one of the sidecar's own"),
    "a volume at a relative path": (volume(mountPath="etc"), "a path such as /etc/my-files"),
    "a source of two kinds": (
        volume(
            configMap=None, projected={"sources": [{"configMap": {"name": "a"}, "secret": {"name": "b"}}]}
        ),
        "a source is one of",
    ),
    "a proxy with a password": ({"network": {"httpsProxy": "http://user:pw@proxy:1"}}, "without credentials"),
    "networks past the proxy": (
        {"network": {"httpsProxy": "http://proxy:1", "noProxy": "10.0.0.0/8"}},
        "no networks",
    ),
    "past no proxy": ({"network": {"noProxy": "a"}}, "nothing without httpsProxy"),
    "authorities of nowhere": ({"network": {"caBundle": {"key": "ca.crt"}}}, "Required value"),
    "an interval as a number": ({"interval": {"every": 300}}, "must be of type string"),
    "an interval without a unit": ({"interval": {"every": "300"}}, A_DURATION),
    "a negative interval": ({"interval": {"every": "-5m"}}, A_DURATION),
    "days": ({"interval": {"every": "1d"}}, A_DURATION),
    "an interval beyond a week": ({"interval": {"every": "168h1ms"}}, "from 0s to 168h"),
    "no timer at all": ({"interval": {"every": "0s"}}, "it needs everySteps above 0"),
    "no timer and no steps": (
        {"interval": {"every": "0m0s", "everySteps": 0}},
        "it needs everySteps above 0",
    ),
    "steps as text": ({"interval": {"everySteps": "10"}}, "must be of type integer"),
    "a goal in a word": ({"interval": {"goal": "auto"}}, "must be of type object"),
    "a goal that is not known": (goal(type="Soon"), "supported values"),
    "a goal without its amount": (goal(type="Overhead"), "type Overhead needs overhead"),
    "a goal with another's amount": (
        goal(type="Overhead", overhead="1%", lostWork="5m"),
        "lostWork belongs to type LostWork",
    ),
    "a goal without a type": (goal(lostWork="5m"), "Required value"),
    "an overhead of all": (goal(type="Overhead", overhead="51%"), "at most 50%"),
    "an overhead of nothing": (goal(type="Overhead", overhead="0.0%"), "above 0"),
    "no lost work at all": (goal(type="LostWork", lostWork="0s"), "from 1ms to 168h"),
    "a month of lost work": (goal(type="LostWork", lostWork="720h"), "from 1ms to 168h"),
    "a pls above all": (goal(type="PLS", pls="2"), "at most 1"),
    "bounds that cross": ({"interval": {"atLeast": "60s", "atMost": "59s"}}, "atLeast is above atMost"),
    "a bound beyond a week": ({"interval": {"atMost": "169h"}}, "from 0s to 168h"),
    "a goal of bits that is not known": ({"precision": {"goal": "Small"}}, "supported values"),
    "five bits at least": ({"precision": {"leastBits": 5}}, "supported values"),
    "a table without a name": ({"precision": {"tables": {"": "q8"}}}, "encodings by table"),
    "tables that are too many": (
        {"precision": {"tables": {f"{'x' * 100}{n}": "q8" for n in range(40)}}},
        "at most 3072 characters in all",
    ),
    "a table of an unknown encoding": ({"precision": {"tables": {"emb": "q7"}}}, "supported values"),
    "an unknown differential": ({"differential": "sometimes"}, "supported values"),
    "an arena too small": ({"arenaSize": "63Mi"}, "from 64Mi to 1Ti"),
    "an arena too large": ({"arenaSize": "2Ti"}, "from 64Mi to 1Ti"),
    "an arena that is no quantity": ({"arenaSize": "much"}, "from 64Mi to 1Ti"),
    "a cache too small": ({"cacheSize": 1}, "at least 64Mi"),
    "nothing to keep": ({"keepLast": 0}, "greater than or equal to 1"),
    "no time to save": ({"gracePeriod": "4s"}, "from 5s to 24h"),
    "a reclaim that is neither": ({"reclaim": {"policy": "Recycle"}}, "supported values"),
    "a removal after eleven years": ({"reclaim": {"after": "99999h"}}, "from 0s to 87600h"),
    "an account of no name": ({"reclaim": {"serviceAccount": "Trainer!"}}, "the name of an object"),
    "root": ({"sidecar": {"runAsUser": 0}}, "greater than or equal to 1"),
    "no processor": ({"sidecar": {"resources": {"limits": {"cpu": "0"}}}}, "above 0"),
    "a port beyond": ({"sidecar": {"metricsPort": 65536}}, "less than or equal to 65535"),
}
"""Wrong values, and what the API server's sentence says of each."""


@pytest.fixture
def http(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as http:
        yield http


KINDS = ("CheckpointPolicy", "ClusterCheckpointPolicy")


def policy(change: dict[str, Any] | None = None, kind: str = KINDS[0]) -> dict[str, Any]:
    spec = {k: v for k, v in (copy.deepcopy(GOOD_POLICY) | (change or {})).items() if v is not None}
    return {
        "apiVersion": "deltashard.io/v1alpha1",
        "kind": kind,
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_with_every_field_is_stored_as_written_and_read_by_the_injector(
    http: Rest, kind: str
) -> None:
    reply = http.create(policy(kind=kind))
    assert reply.status == 201, reply.document
    assert reply.warnings == []  # an unknown field would be pruned with a warning or silently
    assert reply.document["spec"] == GOOD_POLICY
    assert workload_policy.read("p", reply.document["spec"]).run_as_user is None


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"type": "Auto"}, "auto"),
        ({"type": "Fixed"}, "fixed"),
        ({"type": "Overhead", "overhead": "50%"}, "overhead=50%"),
        ({"type": "Overhead", "overhead": "0.001%"}, "overhead=0.001%"),
        ({"type": "LostWork", "lostWork": "168h"}, "lost-work=168h"),
        ({"type": "LostWork", "lostWork": "1m30s250ms"}, "lost-work=90250ms"),
        ({"type": "PLS", "pls": "0.02"}, "pls=0.02"),
        ({"type": "PLS", "pls": "1"}, "pls=1"),
    ],
)
def test_a_goal_that_the_api_takes_is_one_that_is_read(http: Rest, said: dict[str, str], meant: str) -> None:
    reply = http.create(policy({"interval": {"goal": said}}))
    assert reply.status == 201, reply.document
    assert workload_policy.read("p", reply.document["spec"]).goal == meant


def test_what_has_a_fixed_default_is_stated_by_the_api(http: Rest) -> None:
    bundle = {"network": {"caBundle": {"configMap": "authorities"}}}
    spec = http.create(policy(s3(secretRef={"name": "store"}) | bundle)).document["spec"]
    assert spec["store"]["secretRef"] == {"name": "store", "key": "credentials"}
    assert spec["network"]["caBundle"] == {"configMap": "authorities", "key": "ca.crt"}


def test_the_claim_of_a_store_never_changes(http: Rest) -> None:
    reply = http.create(policy(mounted()))
    assert reply.status == 201, reply.document
    spec = reply.document["spec"] | {"sidecar": {"image": "i"}}
    assert workload_policy.read("p", spec).claim == "checkpoints"
    path = f"{root(plural='checkpointpolicies')}/{reply.document['metadata']['name']}"
    change = {"spec": {"store": {"claim": "other"}}}
    reply = http("PATCH", path, change, content="application/merge-patch+json")
    assert (reply.status, "store.claim never changes" in reply.document["message"]) == (422, True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"store": {"url": "s3://elsewhere/x"}}, "store.url never changes"),
        ({"store": None}, "store neither comes nor goes"),
        ({"store": {"region": "eu-north-1", "secretRef": {"name": "other"}}}, ""),
    ],
)
def test_the_url_of_a_store_never_changes_and_the_way_to_it_may(
    http: Rest, change: dict[str, Any], says: str
) -> None:
    name = http.create(policy()).document["metadata"]["name"]
    path, merge = f"{root(plural='checkpointpolicies')}/{name}", "application/merge-patch+json"
    reply = http("PATCH", path, {"spec": change}, content=merge)
    assert (reply.status, says in reply.document.get("message", "")) == (422 if says else 200, True)


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


def test_what_a_newer_policy_does_not_state_is_gone_from_the_status(http: Rest) -> None:
    run_before = full_run()
    before = run_record.status(run_before, NOW_S)
    newer = replace(run_before.progress, policy=pb.Policy(encoding="q4", every_s=0.5))
    after = run_record.status(replace(run_before, progress=newer), NOW_S)
    path = f"{root()}/{http.create(run()).document['metadata']['name']}/status?fieldValidation=Strict"
    merge = "application/merge-patch+json"
    assert http("PATCH", path, {"status": before}, content=merge).status == 200
    reply = http("PATCH", path, {"status": run_record.patch(before, after)}, content=merge)
    assert (reply.status, reply.warnings) == (200, [])
    assert reply.document["status"] == after


def test_an_empty_policy_is_possible_since_the_default_is_under_it(http: Rest) -> None:
    assert http.create(policy(dict.fromkeys(GOOD_POLICY))).status == 201


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BAD)
def test_a_policy_with_nonsense_is_refused_before_it_is_stored(http: Rest, name: str, kind: str) -> None:
    change, says = BAD[name]
    reply = http.create(policy(change, kind))
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
    assert {"Goal", "Why"} <= set(wide)
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
