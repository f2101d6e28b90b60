"""The custom resources' schemas on a real API server: accepted and rejected objects, and kubectl's output."""

from __future__ import annotations

import copy
import uuid
from dataclasses import replace
from typing import Any

import pytest
import yaml
from deltashard_operator.api import workload_policy
from deltashard_operator.run import run_record
from deltashard_operator.run.reclaim import Reclaim, ReclaimState
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.operator.full_run import NOW_S, full_run
from tests.support.server.apiserver import Rest

GOOD_POLICY: dict[str, Any] = yaml.safe_load("""
store:
  {url: s3://checkpoints/team-a, endpoint: http://minio.minio.svc:9000, region: eu-west-1, addressing: path,
   encryption: {kind: SSE-KMS, keyId: alias/checkpoints}, secretRef: {name: store, key: aws},
   webIdentity:
     {audience: sts.amazonaws.com, roleArn: arn:aws:iam::123456789012:role/team-a, stsEndpoint: https://sts.example}}
interval: {every: 5m, everySteps: 0, goal: {type: Overhead, overhead: 0.5%}, min: 1m, max: 30m}
precision: {encoding: q8, goal: Budget, minBits: 4, tables: {model.emb.user: q8, emb/item: q4}}
differential: intermittent
arenaSize: 256Mi
cacheSize: 10737418240
keepLast: 3
gracePeriod: 2m
reclaim: {policy: Delete, after: 24h, serviceAccount: trainer}
sidecar:
  image: registry.example/sidecar:1
  imagePullPolicy: Always
  imagePullSecrets: [pull]
  resources:
    requests: {cpu: 500m, memory: 512Mi, ephemeral-storage: 0}
    limits: {cpu: 2, memory: 1Gi, ephemeral-storage: 12Gi}
  runAsUser: null
  metricsPort: 24464
  hostNetworkMetricsPort: 0
  env: [{name: GOMEMLIMIT, value: 1GiB}]
  volumes:
    - {name: a, mountPath: /etc/a, configMap: {name: files, optional: true}}
    - {name: b, mountPath: /etc/b, secret: {secretName: keys}}
    - name: c
      mountPath: /var/lib/c
      projected:
        sources:
          - {serviceAccountToken: {audience: vault, expirationSeconds: 600, path: token}}
          - {configMap: {name: files}}
          - {secret: {name: keys, optional: false}}
    - name: d
      mountPath: /etc/keys
      csi: {driver: secrets-store.csi.k8s.io, volumeAttributes: {secretProviderClass: store}}
network:
  httpsProxy: http://proxy.example:3128
  httpProxy: http://proxy.example:3128
  noProxy: minio.example,.internal
  caBundle: {configMap: authorities, key: ca.crt}
""")
"""A policy with every field."""


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


def env(**variable: str) -> dict[str, Any]:
    return {"sidecar": {"env": [variable]}}


def azure(**identity: str) -> dict[str, Any]:
    return {"store": {"url": "az://bucket/x", "webIdentity": identity}}


A_DURATION = "such as 90s, 5m or 1h30m"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"precision": {"encoding": "q7"}}, "supported values"),
    ({"store": {"url": "s3://bucket/x?endpoint=evil"}}, "it must be s3://bucket/prefix"),
    ({"store": {"url": "s3://b/$(NODE_NAME)"}}, "it must be s3://bucket/prefix"),
    ({"store": {"url": "s3://bucket/../x"}}, "contains '..'"),
    ({"store": {"secretRef": {"name": "store"}}}, "Required value"),
    (s3(endpoint="minio:9000"), "it must be http(s)://host:port"),
    (mounted(url="file:///var/cache/x"), "or file:///mnt/NAME/prefix"),
    (mounted(url="file:///mnt/"), "or file:///mnt/NAME/prefix"),
    ({"store": {"url": "file:///mnt/shared"}}, "file:///mnt/NAME needs claim, the PersistentVolumeClaim"),
    (s3(claim="checkpoints"), "claim is only for file:///mnt/NAME"),
    (mounted(claim="Not A Name"), "the name of an object"),
    (mounted(secretRef={"name": "s"}), "which needs no credentials"),
    (mounted(webIdentity={}), "which needs no credentials"),
    (mounted(endpoint="http://h"), "which needs no credentials"),
    (mounted(region="eu"), "only for s3://"),
    (mounted() | volume(mountPath="/mnt/shared/x"), "sidecar.volumes must not be mounted in /mnt"),
    ({"store": {"url": "gs://bucket/x", "region": "eu"}}, "only for s3://"),
    (s3(account="abc"), "is only for az://"),
    ({"store": {"url": "gs://bucket/x", "endpoint": "http://h/path"}}, "has a path only for az://"),
    ({"store": {"url": "gs://bucket/x", "webIdentity": {}}}, "the pod's service account its identity"),
    (azure(clientId="c", tenantId="t", roleArn="r"), "roleArn and stsEndpoint are only for s3://"),
    (azure(clientId="c"), "needs clientId and tenantId"),
    (s3(webIdentity={"clientId": "c"}), "only for az://"),
    (s3(encryption={"kind": "SSE-S3", "keyId": "k"}), "keyId belongs to kind SSE-KMS"),
    (s3(encryption={"kind": "SSE-KMS", "keyId": "a b"}), "the id, alias or ARN of a key"),
    (s3(encryption={"kind": "SSE-C"}), "supported values"),
    (s3(addressing="dns"), "supported values"),
    (s3(secretRef={"name": "Not A Name"}), "the name of an object"),
    (s3(secretRef={"name": "s", "key": "../x"}), "a file's name"),
    (env(name="DELTASHARD_URL", value="x"), "reserved for the sidecar"),
    (env(name="HOME", value="/"), "reserved for the sidecar"),
    (env(name="1A", value="x"), "a variable's name"),
    (env(name="https_proxy", value="http://p:1"), "set proxies with network"),
    (env(name="A", value="x" * 4097), "may not be more than 4096"),
    ({"sidecar": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}, "Duplicate value"),
    (volume(configMap=None, hostPath={"path": "/"}), "nothing from the node"),
    (volume(secret={"secretName": "s"}), "a volume is one of"),
    (volume(name="deltashard-shm"), "reserved for the sidecar"),
    (volume(mountPath=None), "Required value"),
    (volume(mountPath="/etc/deltashard/store"), "in or above one of the sidecar's own"),
    (volume(mountPath="/run"), "in or above one of the sidecar's own"),
    (volume(mountPath="etc"), "a path such as /etc/my-files"),
    (
        volume(
            configMap=None, projected={"sources": [{"configMap": {"name": "a"}, "secret": {"name": "b"}}]}
        ),
        "a source is one of",
    ),
    ({"network": {"httpsProxy": "http://user:pw@proxy:1"}}, "without credentials"),
    ({"network": {"httpsProxy": "http://proxy:1", "noProxy": "10.0.0.0/8"}}, "no networks"),
    ({"network": {"noProxy": "a"}}, "needs httpsProxy"),
    ({"network": {"caBundle": {"key": "ca.crt"}}}, "Required value"),
    ({"interval": {"every": 300}}, "must be of type string"),
    ({"interval": {"every": "300"}}, A_DURATION),
    ({"interval": {"every": "-5m"}}, A_DURATION),
    ({"interval": {"every": "1d"}}, A_DURATION),
    ({"interval": {"every": "168h1ms"}}, "from 0s to 168h"),
    ({"interval": {"every": "0s"}}, "it needs everySteps above 0"),
    ({"interval": {"every": "0m0s", "everySteps": 0}}, "it needs everySteps above 0"),
    ({"interval": {"everySteps": "10"}}, "must be of type integer"),
    ({"interval": {"goal": "auto"}}, "must be of type object"),
    (goal(type="Soon"), "supported values"),
    (goal(type="Overhead"), "type Overhead needs overhead"),
    (goal(type="Overhead", overhead="1%", lostWork="5m"), "lostWork belongs to type LostWork"),
    (goal(lostWork="5m"), "Required value"),
    (goal(type="Overhead", overhead="51%"), "at most 50%"),
    (goal(type="Overhead", overhead="0.0%"), "above 0"),
    (goal(type="LostWork", lostWork="0s"), "from 1ms to 168h"),
    (goal(type="LostWork", lostWork="720h"), "from 1ms to 168h"),
    (goal(type="PLS", pls="2"), "at most 1"),
    ({"interval": {"min": "60s", "max": "59s"}}, "min is above max"),
    ({"interval": {"max": "169h"}}, "from 0s to 168h"),
    ({"precision": {"goal": "Small"}}, "supported values"),
    ({"precision": {"minBits": 5}}, "supported values"),
    ({"precision": {"tables": {"": "q8"}}}, "encodings by table"),
    (
        {"precision": {"tables": {f"{'x' * 100}{n}": "q8" for n in range(40)}}},
        "at most 3072 characters in all",
    ),
    ({"precision": {"tables": {"emb": "q7"}}}, "supported values"),
    ({"differential": "sometimes"}, "supported values"),
    ({"arenaSize": "63Mi"}, "from 64Mi to 1Ti"),
    ({"arenaSize": "2Ti"}, "from 64Mi to 1Ti"),
    ({"arenaSize": "much"}, "from 64Mi to 1Ti"),
    ({"cacheSize": 1}, "at least 64Mi"),
    ({"keepLast": 0}, "greater than or equal to 1"),
    ({"gracePeriod": "4s"}, "from 5s to 24h"),
    ({"reclaim": {"policy": "Recycle"}}, "supported values"),
    ({"reclaim": {"after": "99999h"}}, "from 0s to 87600h"),
    ({"reclaim": {"serviceAccount": "Trainer!"}}, "the name of an object"),
    ({"sidecar": {"runAsUser": 0}}, "greater than or equal to 1"),
    ({"sidecar": {"resources": {"limits": {"cpu": "0"}}}}, "above 0"),
    ({"sidecar": {"metricsPort": 65536}}, "less than or equal to 65535"),
]
"""Invalid values, and a part of the API server's message for each."""


KINDS = ("CheckpointPolicy", "ClusterCheckpointPolicy")
MERGE = "application/merge-patch+json"


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
def test_full_policy_is_stored_unchanged_and_parsed(http: Rest, kind: str) -> None:
    reply = http.create(policy(kind=kind))
    assert reply.status == 201, reply.document
    assert reply.warnings == []  # an unknown field would be pruned with a warning or silently
    assert reply.document["spec"] == GOOD_POLICY
    assert workload_policy.read("p", reply.document["spec"]).sidecar["runAsUser"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"type": "Auto"}, "auto"),
        ({"type": "Fixed"}, ""),
        ({"type": "Overhead", "overhead": "50%"}, "overhead=50%"),
        ({"type": "Overhead", "overhead": "0.001%"}, "overhead=0.001%"),
        ({"type": "LostWork", "lostWork": "168h"}, "lost-work=168h"),
        ({"type": "LostWork", "lostWork": "1m30s250ms"}, "lost-work=90250ms"),
        ({"type": "PLS", "pls": "0.02"}, "pls=0.02"),
        ({"type": "PLS", "pls": "1"}, "pls=1"),
    ],
)
def test_accepted_goal_is_parsed(http: Rest, text: dict[str, str], expected: str) -> None:
    reply = http.create(policy({"interval": {"goal": text}}))
    assert reply.status == 201, reply.document
    assert workload_policy.read("p", reply.document["spec"]).saving.goal == expected


def test_fixed_defaults_are_set_by_api(http: Rest) -> None:
    bundle = {"network": {"caBundle": {"configMap": "authorities"}}}
    spec = http.create(policy(s3(secretRef={"name": "store"}) | bundle)).document["spec"]
    assert spec["store"]["secretRef"] == {"name": "store", "key": "credentials"}
    assert spec["network"]["caBundle"] == {"configMap": "authorities", "key": "ca.crt"}


@pytest.mark.parametrize(
    ("change", "message", "before"),
    [
        ({"store": {"url": "s3://elsewhere/x"}}, "store.url never changes", {}),
        ({"store": None}, "store must not be added or removed", {}),
        ({"store": {"claim": "other"}}, "store.claim never changes", mounted()),
        ({"store": {"region": "eu-north-1", "secretRef": {"name": "other"}}}, "", {}),
    ],
)
def test_store_is_immutable_but_its_access_is_not(
    http: Rest, change: dict[str, Any], message: str, before: dict[str, Any]
) -> None:
    name = http.create(policy(before)).document["metadata"]["name"]
    reply = http("PATCH", f"{root(plural='checkpointpolicies')}/{name}", {"spec": change}, content=MERGE)
    assert (reply.status, message in reply.document.get("message", "")) == (422 if message else 200, True)


def test_run_status_is_stored_unchanged(http: Rest) -> None:
    """The resource has every field that the controller writes. A field that a newer policy omits is removed."""
    removed = Reclaim(state=ReclaimState.REMOVED, since_s=NOW_S, message="12 objects", due_s=NOW_S)
    before = replace(full_run(), reclaim=removed)
    newer = replace(before.progress, policy=pb.Policy(encoding="q4", every_s=0.5))
    status, after = (run_record.status(each, NOW_S) for each in (before, replace(before, progress=newer)))
    path = f"{root()}/{http.create(run()).document['metadata']['name']}/status?fieldValidation=Strict"
    for patch, wanted in ((status, status), (run_record.patch(status, after), after)):
        reply = http("PATCH", path, {"status": patch}, content=MERGE)
        assert (reply.status, reply.warnings) == (200, []), reply.document
        assert reply.document["status"] == wanted


def test_empty_policy_is_valid(http: Rest) -> None:
    assert http.create(policy(dict.fromkeys(GOOD_POLICY))).status == 201


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("change", "message"), BAD)
def test_invalid_policy_is_refused(http: Rest, change: dict[str, Any], message: str, kind: str) -> None:
    reply = http.create(policy(change, kind))
    assert (reply.status, message in reply.document["message"]) == (422, True), reply.document


def test_run_spec_is_immutable_and_status_is_subresource(http: Rest) -> None:
    created = http.create(run())
    assert created.status == 201, created.document
    path = f"{root()}/{created.document['metadata']['name']}"
    changed = http("PATCH", path, {"spec": {"runId": "other"}}, content=MERGE)
    assert (changed.status, "never changes" in changed.document["message"]) == (422, True)
    ignored = http("PATCH", path, {"status": {"phase": "Training"}}, content=MERGE)
    assert (ignored.status, "status" in ignored.document) == (200, False)
    written = http("PATCH", f"{path}/status", {"status": {"phase": "Training", "step": 7}}, content=MERGE)
    assert (written.status, written.document["status"]["step"]) == (200, 7)


def test_kubectl_get_columns(http: Rest) -> None:
    """The API server itself makes the table that kubectl prints."""
    path = f"{root()}/{http.create(run()).document['metadata']['name']}"
    status = {"status": run_record.status(full_run(), NOW_S)}
    assert http("PATCH", f"{path}/status", status, content=MERGE).status == 200
    table = http("GET", path, accept="application/json;as=Table;v=v1;g=meta.k8s.io").document
    shown = zip(table["columnDefinitions"], table["rows"][0]["cells"], strict=True)
    assert not [column["name"] for column, cell in shown if column["priority"] == 0 and not cell]
