"""A namespace's user cannot reach other namespaces' policies, Secrets or checkpoints."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.abc import AccessDenied
from deltashard_checkpoint.stores.url import open_store
from deltashard_operator.kube import cluster_name, webhook_configuration

from tests.support.checkpoint.written_run import WrittenRun
from tests.support.eventually import eventually
from tests.support.operator import sample
from tests.support.operator.webhook_process import WebhookProcess, has_sidecar, opted, pod, registered
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.minio_server import ROOT, MinioServer
from tests.support.server.minio_user import keys_of

PAGE = (ROOT / "docs" / "kubernetes" / "tenants.md").read_text()
SECRET = "the-other-teams-key"
CREDENTIALS = f"[default]\naws_access_key_id = b\naws_secret_access_key = {SECRET}\n"


POLICIES = "/apis/deltashard.io/v1alpha1/namespaces/{}/checkpointpolicies"
THEIRS = "s3://checkpoints/team-b"


def policy(name: str = "p", **store: Any) -> dict[str, Any]:
    return sample.policy_object(name, store=store)


@dataclass(frozen=True)
class Teams:
    """Two namespaces and a user who may write policies, Secrets, Jobs and pods in the first one only."""

    rest: Rest
    user: Rest
    mine: str
    other: str

    def sidecar(self, annotations: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (spec, sidecar) of the user's pod with these annotations."""
        made = self.user.create(pod("mine", annotations), self.mine, dry_run=True)
        assert has_sidecar(made), made.document
        return made.document["spec"], sample.sidecar_of(made.document)


@pytest.fixture(scope="module")
def teams(apiserver: ApiServer, shared_webhook: WebhookProcess) -> Iterator[Teams]:
    with apiserver.http() as rest, apiserver.http(user="alice") as user:
        tail = uuid.uuid4().hex[:8]
        mine, other = f"team-a-{tail}", f"team-b-{tail}"
        for each in (mine, other):
            rest.namespace(each)
        rules = [
            {"apiGroups": ["deltashard.io"], "resources": ["checkpointpolicies"], "verbs": ["*"]},
            {"apiGroups": ["", "batch"], "resources": ["pods", "secrets", "jobs"], "verbs": ["*"]},
        ]
        rest.grant("alice", mine, *rules)
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "b-keys"}}
        data = {"credentials": base64.b64encode(CREDENTIALS.encode()).decode()}
        assert rest.create({**secret, "data": data}, other).status == 201
        assert rest.create(policy("theirs", url=THEIRS, secretRef={"name": "b-keys"}), other).status == 201
        eventually(lambda: user("GET", POLICIES.format(mine)).status == 200, what="the user's rights")
        with registered(rest, shared_webhook.client_config()):
            yield Teams(rest, user, mine, other)


def test_other_namespace_policies_and_secrets_are_unreachable(teams: Teams) -> None:
    """RBAC blocks direct access. Admission blocks access through annotations and policies."""
    user, other = teams.user, teams.other
    assert user("GET", f"{POLICIES.format(other)}/theirs").status == 403
    assert user.create(policy(url="s3://mine"), other).status == 403
    assert user("GET", f"/api/v1/namespaces/{other}/secrets/b-keys").status == 403
    assert user.create(pod("there", opted()), other).status == 403

    def reason(**annotations: str) -> str:
        reply = user.create(pod("mine", opted(**annotations)), teams.mine, dry_run=True)
        return str(reply.document.get("reason"))

    assert reason(policy="theirs") == "PolicyNotFound"
    assert reason(policy=f"{other}/theirs") == "BadAnnotation"
    for run_id in (f"../{other}/exp", f"{other}/exp", "..", f"$({cluster_name.POLICY})"):
        assert reason(run_id=run_id) == "BadAnnotation"
    for bad in (f"{other}/b-keys", "../b-keys"):
        assert user.create(policy(url="s3://mine-x", secretRef={"name": bad}), teams.mine).status == 422
    assert user.create(policy(url="s3://mine-x/../checkpoints"), teams.mine).status == 422


def test_foreign_prefix_grants_no_foreign_credentials(teams: Teams) -> None:
    """A policy may name any URL and any Secret. The keys still come from the pod's own namespace."""
    for each in (policy(url=THEIRS, secretRef={"name": "b-keys"}), policy("bare", url=THEIRS)):
        assert teams.user.create(each, teams.mine).status == 201
    try:
        spec, sidecar = teams.sidecar(opted(policy="p"))
        volume = next(each for each in spec["volumes"] if each["name"] == cluster_name.STORE_VOLUME)
        assert set(volume["secret"]) <= {"secretName", "optional", "defaultMode"}, "the pod's own Secret"
        values = sample.expanded(sidecar, {"metadata.namespace": teams.mine})
        assert values["DELTASHARD_RUN"].startswith(f"{teams.mine}/"), "also under the URL of another"
        entry = next(each for each in sidecar["env"] if each["name"] == "POD_NAMESPACE")
        assert entry["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
        spec, sidecar = teams.sidecar(opted(policy="bare"))
        assert not any(each["name"] == cluster_name.STORE_VOLUME for each in spec["volumes"]), (
            "the default policy's Secret is not used"
        )
        assert not any(each["name"].startswith("AWS_") for each in sidecar["env"])
    finally:
        for name in ("p", "bare"):
            assert teams.user("DELETE", f"{POLICIES.format(teams.mine)}/{name}").status == 200


def test_webhook_answers_contain_no_secrets(teams: Teams, shared_webhook: WebhookProcess) -> None:
    """Any client of the port may ask for another namespace and learns names only. The webhook reads no Secrets."""
    document = pod("asked", opted(policy="theirs"))
    review = sample.review(document, namespace=teams.other)
    ca = shared_webhook.authority.pem.decode()
    with urllib3.PoolManager(ca_cert_data=ca, retries=False, timeout=60.0) as http:
        url = f"https://localhost:{shared_webhook.port}{webhook_configuration.PATH}"
        reply = http.request(
            "POST", url, body=json.dumps(review), headers={"Content-Type": "application/json"}
        )
    assert reply.status == 200
    response = json.loads(reply.data)["response"]
    text = json.dumps(response) + base64.b64decode(response["patch"]).decode()
    assert "b-keys" in text, "the answer names the Secret for the kubelet"
    assert SECRET not in text
    assert base64.b64encode(CREDENTIALS.encode()).decode() not in text
    sidecar = sample.sidecar_of(sample.applied(document, response))
    secret = re.compile(r"SECRET|PASSWORD|ACCESS_KEY|SESSION_TOKEN", re.IGNORECASE)
    assert not [each["name"] for each in sidecar["env"] if secret.search(each["name"])]


@pytest.mark.minio
def test_documented_keys_reach_own_namespace_only(
    minio_server: MinioServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the documented policy at a real store a namespace can access its own runs only."""
    bucket = minio_server.new_bucket()
    (found,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    document = json.loads(found.replace("arn:aws:s3:::checkpoints", f"arn:aws:s3:::{bucket}"))
    url = minio_server.url(bucket, "training")

    def become(environment: dict[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    become(minio_server.environment)
    with open_store(url) as store:
        other = WrittenRun(store, "team-b/exp", tmp_path / "b")
        other.save(step=1)
        other.close()
        keys = [each.key for each in store.list("team-b/")]
    become(keys_of(minio_server, document))
    with open_store(url) as store:
        mine = WrittenRun(store, "team-a/exp", tmp_path / "a")
        mine.save(step=1)
        mine.save(mine.train(), step=2)
        mine.close()
        assert RunLog(store, "team-a/exp").refresh() is not None
        with pytest.raises(AccessDenied):
            RunLog(store, "team-b/exp").refresh()
        with pytest.raises(AccessDenied):
            store.get(keys[0])
        with pytest.raises(AccessDenied):
            # MinIO sometimes closes the connection of a refused upload before the answer is read, so a put is retried.
            store.put("team-b/exp/log/intruder", b"x")
        with pytest.raises(AccessDenied):
            list(store.list("team-b/"))
    become(minio_server.environment)
    with open_store(url) as store:
        assert [each.key for each in store.list("team-b/")] == keys
