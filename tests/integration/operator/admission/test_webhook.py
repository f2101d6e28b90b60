"""The webhook as a TLS process behind a real API server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltashard_operator.kube import cluster_name

from tests.support.eventually import eventually
from tests.support.helm import render
from tests.support.operator import sample
from tests.support.operator.sample import policy_object
from tests.support.operator.webhook_process import WebhookProcess, has_sidecar, job, opted, pod, registered
from tests.support.server.apiserver import ApiServer, CertificateAuthority, Reply, Rest, collection, put
from tests.support.server.minio_server import free_port
from tests.support.tool import require_tool

OF_JOB = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "0b4f", "controller": True}
"""The owner reference that the Job's controller sets on its pods."""


def test_webhook_outage_affects_annotated_objects_only(http: Rest) -> None:
    """Under failurePolicy Fail, objects without the annotation are admitted, with or without an annotations map."""
    unreachable = {"url": f"https://127.0.0.1:{free_port()}/mutate"}
    with registered(http, unreachable):
        for annotations in (None, {}, {"other.io/policy": "x"}, {cluster_name.ENCODING: "q8"}):
            assert http.create(job("free", annotations), dry_run=True).status == 201
            assert http.create(pod("free", annotations), dry_run=True).status == 201
        marked = pod("marked", {**opted(), cluster_name.INJECTED: "0.1.0"})
        marked["metadata"]["ownerReferences"] = [OF_JOB]
        assert http.create(marked, dry_run=True).status == 201, "an injected template's pods need no webhook"
        mirror = pod("mirror", {**opted(), "kubernetes.io/config.mirror": "hash"})
        mirror["spec"]["nodeName"] = "n1"
        assert http.create(mirror, dry_run=True).status == 201, "a static pod's copy cannot be changed"
        for document in (job("asked", opted()), pod("asked", opted())):
            refused = http.create(document, dry_run=True)
            assert refused.status == 500
            assert "failed calling webhook" in refused.document["message"]
        rejections = http.text("/metrics")  # the metric of the alert WebhookErrors
        assert re.search(
            r'^apiserver_admission_webhook_rejection_count\{.*"calling_webhook_error"',
            rejections,
            re.MULTILINE,
        )
        inner = job("inner")
        inner["spec"]["template"]["metadata"] = {"annotations": opted()}
        assert http.create(inner, dry_run=True).status == 500, "an annotation on the pod template also counts"


def test_annotated_job_is_injected(http: Rest, webhook: WebhookProcess) -> None:
    """The stored Job has the sidecar and the labels, and its pod does not need the webhook."""
    with registered(http, webhook.client_config()):
        made = http.create(job("trains", opted(interval="90s")))
        assert made.status == 201, made
        assert not made.warnings
        assert made.document["metadata"]["labels"][cluster_name.MANAGED_BY] == "deltashard"
        template = made.document["spec"]["template"]
        values = sample.expanded(sample.sidecar_of(template), {})
        assert values["DELTASHARD_EVERY_S"] == "90"
        child = {"apiVersion": "v1", "kind": "Pod", **template}
        child["metadata"] = {**template["metadata"], "name": "trains-x", "ownerReferences": [OF_JOB]}
        webhook.stop()
        made = http.create(child, dry_run=True)
        assert made.status == 201
        assert sum(c["name"] == cluster_name.SIDECAR for c in made.document["spec"]["initContainers"]) == 1


def test_refusals_and_warnings_reach_client(http: Rest, shared_webhook: WebhookProcess) -> None:
    """The message, the reason code and the warning headers reach the client. Metrics count by code."""
    with registered(http, shared_webhook.client_config()):
        refused = http.create(job("wrong", opted(encoding="q7")), dry_run=True)
        assert refused.status == 422
        assert refused.document["reason"] == "BadAnnotation"
        assert "deltashard.io/encoding: 'q7' is not valid" in refused.document["message"]
        warned = http.create(job("short", opted(), terminationGracePeriodSeconds=45), dry_run=True)
        assert warned.status == 201
        assert "terminationGracePeriodSeconds is 45 s" in warned.warnings[0]
        _, page = shared_webhook.get("metrics")
    counted = next(line for line in page.splitlines() if 'kind="Job",outcome="BadAnnotation"' in line)
    assert float(counted.split()[-1]) >= 1
    assert "deltashard_webhook_ready 1.0" in page


def test_new_policy_is_found_and_missing_one_is_named(http: Rest, shared_webhook: WebhookProcess) -> None:
    """A cache miss causes one live read, then a refusal that names the policy. Namespaced policies are separate."""

    def asked(policy: str) -> Reply:
        return http.create(job("late", {cluster_name.POLICY: policy}), dry_run=True)

    with registered(http, shared_webhook.client_config()):
        refused = asked("mine").document
        assert refused["reason"] == "PolicyNotFound"
        assert "there is no CheckpointPolicy 'mine' in the workload's namespace" in refused["message"]
        mine = policy_object("mine", precision={"encoding": "q4"}, store={"url": "s3://own-bucket"})
        assert http.create(mine).status == 201
        made = asked("mine")  # immediately
        assert made.status == 201, made
        values = sample.expanded(sample.sidecar_of(made.document["spec"]["template"]), {})
        assert (values["DELTASHARD_ENCODING"], values["DELTASHARD_URL"]) == ("q4", "s3://own-bucket")
        shared = policy_object("shared", store={"url": "s3://x-y/z", "secretRef": {"name": "own"}})
        http.create({**shared, "kind": "ClusterCheckpointPolicy"})
        assert "'secretName': 'own'" in str(asked("cluster/shared").document), "the workload's own Secret"
        # The value is valid alone, but exceeds the default's max.
        broken = policy_object("broken", interval={"min": "2h", "goal": {"type": "Auto"}})
        assert http.create(broken).status == 201
        refused = asked("broken").document
        assert (refused["reason"], "is above max" in refused["message"]) == ("BadPolicy", True)


@pytest.mark.parametrize(
    "grace", [{}, {"terminationGracePeriodSeconds": 30}, {"terminationGracePeriodSeconds": 200}]
)
@pytest.mark.parametrize("how", [[], ["--server-side"]])
def test_unchanged_manifest_can_be_reapplied(
    http: Rest, shared_webhook: WebhookProcess, tmp_path: Path, how: list[str], grace: dict[str, int]
) -> None:
    """Two runs of kubectl apply succeed, client-side and server-side."""
    manifest = tmp_path / "job.json"
    name = f"again-{len(how)}-{grace.get('terminationGracePeriodSeconds', 0)}"
    inits = [{"name": "one", "image": "i"}, {"name": "two", "image": "i"}]
    spec = {**grace, "initContainers": inits, "securityContext": {"supplementalGroups": [7]}}
    manifest.write_text(json.dumps(job(name, opted(), **spec)))
    config = f"--kubeconfig={shared_webhook.apiserver.kubeconfig}"
    command = [str(require_tool("kubectl")), config, "apply", *how, "-f", str(manifest)]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    with registered(http, shared_webhook.client_config()):
        for _ in range(2):
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False, timeout=60
            )
            assert done.returncode == 0, done.stderr
    found = http("GET", f"/apis/batch/v1/namespaces/default/jobs/{name}")
    assert has_sidecar(found)
    stated = grace.get("terminationGracePeriodSeconds", 120)
    assert found.document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == stated


def test_rotation_under_load_fails_no_admission(http: Rest, webhook: WebhookProcess) -> None:
    """The bundle has both authorities, then the certificate changes, then the old authority is removed."""
    old, new = webhook.authority, CertificateAuthority("new")
    failed: list[Reply] = []
    done = threading.Event()
    answered = [0] * 3

    def load(worker: int) -> None:
        with webhook.apiserver.http() as own:
            while not done.is_set():
                reply = own.create(job("load", opted()), dry_run=True)
                answered[worker] += 1
                if reply.status != 201 or not has_sidecar(reply):
                    failed.append(reply)

    def more(n: int = 20) -> None:
        goal = sum(answered) + n
        eventually(lambda: sum(answered) >= goal or failed, what="more admissions")

    def loaded() -> float:
        _, page = webhook.get("metrics")
        line = next(each for each in page.splitlines() if 'loads_total{outcome="loaded"}' in each)
        return float(line.split()[-1])

    with registered(http, webhook.client_config()) as change:
        workers = [threading.Thread(target=load, args=(n,)) for n in range(3)]
        for worker in workers:
            worker.start()
        try:
            more()
            change(webhook.client_config(old, new))
            more(60)  # without the new bundle in the API server the requests below fail
            for _ in range(2):
                before = loaded()
                put(webhook.directory, new.issue())
                eventually(lambda before=before: loaded() > before, what="the new certificate in service")
                more()
            change(webhook.client_config(new))
            more(60)
        finally:
            done.set()
            for worker in workers:
                worker.join()
    assert not failed, failed[0]
    assert webhook.get("healthz")[0] == 200


def test_webhook_lifecycle_from_no_certificate_to_drain(
    http: Rest, apiserver: ApiServer, tmp_path: Path
) -> None:
    """The process is live without a certificate, and ready with it. After SIGTERM it drains requests."""
    webhook = WebhookProcess(apiserver, tmp_path, drain_s=10.0)
    webhook.start(certificate=False)
    eventually(lambda: webhook.get("healthz") == (503, "no certificate is loaded"), what="no certificate")
    put(tmp_path, webhook.authority.issue())
    eventually(lambda: webhook.get("healthz")[0] == 200, what="ready")
    assert webhook.process is not None
    with registered(http, webhook.client_config()):
        webhook.process.send_signal(signal.SIGTERM)
        eventually(lambda: webhook.get("healthz")[0] == 503, what="not ready")
        assert webhook.get("healthz")[1] == "stopping"
        assert webhook.get("livez")[0] == 200
        for _ in range(20):
            assert has_sidecar(http.create(job("last", opted()), dry_run=True))
    assert webhook.stop() == 0


def test_admission_policies_apply_without_webhook(http: Rest) -> None:
    """An annotated Job or pod without sidecar is denied. An annotation that is added later causes a warning."""
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    documents = [each for kind in kinds for each in render().all(kind)]
    for document in documents:
        assert http.create(document).status == 201, document
    ours = [{"name": cluster_name.SIDECAR, "image": "s", "restartPolicy": "Always"}]

    def status(document: dict[str, Any]) -> int:
        return http.create(document, dry_run=True).status

    try:
        for bare in (job, pod):
            eventually(lambda bare=bare: status(bare("bare", opted())) == 422, what="policies in force")
        misspelt = http.create(job("misspelt", {"deltashard.io/Policy": "default"}), dry_run=True)
        assert "add deltashard.io/policy" in misspelt.document["message"]
        message = http.create(job("bare", opted()), dry_run=True).document["message"]
        assert "it has the annotation deltashard.io/policy but no deltashard-sidecar" in message
        admitted = (job("whole", opted(), initContainers=ours), job("free"), pod("free"))
        assert [status(each) for each in admitted] == [201] * 3
        assert http.create(job("late")).status == 201
        path = "/apis/batch/v1/namespaces/default/jobs/late"
        patch = {"metadata": {"annotations": opted()}}

        def late() -> Reply:
            return http("PATCH", path, patch, dry_run=True, content="application/merge-patch+json")

        eventually(lambda: late().warnings, what="a warning about the late annotation")
        assert late().status == 200
        assert "was added to a Job that exists" in late().warnings[0]
        other = {"metadata": {"labels": {"a": "b"}}}
        assert not http("PATCH", path, other, dry_run=True, content="application/merge-patch+json").warnings
    finally:
        for document in reversed(documents):
            http("DELETE", f"{collection(document, '')}/{document['metadata']['name']}")
        for bare in (job, pod):
            eventually(lambda bare=bare: status(bare("bare", opted())) == 201, what="policies removed")


RUNS = "/apis/deltashard.io/v1alpha1/namespaces/default/checkpointruns"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
MERGE = "application/merge-patch+json"


@contextlib.contextmanager
def known(http: Rest, run_id: str, workload: dict[str, str], **spec: str) -> Iterator[str]:
    """Create a CheckpointRun as a stopped controller leaves it, and yield its path."""
    document = {
        "apiVersion": "deltashard.io/v1alpha1",
        "kind": "CheckpointRun",
        "metadata": {"name": f"{run_id}-known", "labels": {cluster_name.RUN_ID: run_id}},
        "spec": {"runId": run_id, "policy": "default", "workload": workload, **spec},
    }
    assert http.create(document).status == 201
    try:
        yield f"{RUNS}/{run_id}-known"
    finally:
        assert http("DELETE", f"{RUNS}/{run_id}-known").status == 200


def asked(http: Rest, name: str, **notes: str) -> str:
    """Return the reason for refusing a Job with these annotations, or an empty string if it is injected."""
    reply = http.create(job(name, opted(**notes)), dry_run=True)
    return "" if has_sidecar(reply) else reply.document["message"].partition(" denied the request: ")[2]


def test_run_id_held_by_live_workload_is_refused(http: Rest, shared_webhook: WebhookProcess) -> None:
    """The run is held until its CheckpointRun is Finished. The workload that holds it may create more pods."""
    holder = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "holder", "uid": "0b4f"}
    own = pod("holder-1", opted(run_id="held"))
    own["metadata"]["ownerReferences"] = [holder | {"controller": True}]
    with (
        registered(http, shared_webhook.client_config()),
        known(http, "held", holder) as path,
    ):
        refused = asked(http, "second", run_id="held")
        assert "held by StatefulSet holder" in refused
        assert "delete CheckpointRun held-known" in refused
        assert has_sidecar(http.create(own, dry_run=True))
        assert not asked(http, "third", run_id="free")
        removing = {"state": "Removing", "since": "2026-01-01T00:00:00Z", "message": "a Job removes them"}
        moved = {"store": "s3://elsewhere/x", "reclaim": None}
        for status, notes, message in (
            ({"phase": "Finished"}, {"run_id": "held"}, ""),
            ({"reclaim": removing}, {"run_id": "held"}, "the checkpoints of run 'held' are being removed"),
            (moved, {"restore_from": "held@best"}, "deltashard.io/restore-from: the policy names the store"),
            (moved, {"run_id": "held"}, "spec.store.url of the CheckpointPolicy: the policy names the store"),
        ):
            assert http("PATCH", f"{path}/status", {"status": status}, content=MERGE).status == 200
            refused = asked(http, "second", **notes)
            assert (message in refused, bool(refused)) == (True, bool(message)), refused
        assert http.create(own, dry_run=True).document["reason"] == "StoreMoved", "the holder's next pod"


def test_copied_pod_reaches_webhook_but_job_pod_does_not(http: Rest, shared_webhook: WebhookProcess) -> None:
    """A pod from an injected Job template bypasses the webhook. A copied pod does not."""
    with registered(http, shared_webhook.client_config()):
        made = http.create(pod("copied", opted()), dry_run=True)
        assert has_sidecar(made)
        copy = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "copied", "annotations": made.document["metadata"]["annotations"]},
            "spec": {k: v for k, v in made.document["spec"].items() if k not in {"nodeName", "priority"}},
        }
        assert has_sidecar(http.create(copy, dry_run=True))
        copy["metadata"]["annotations"] |= {cluster_name.RUN_ID: "other"}
        assert http.create(copy, dry_run=True).document["reason"] == "CopiedManifest"
        copy["metadata"]["ownerReferences"] = [OF_JOB]
        assert has_sidecar(http.create(copy, dry_run=True))


def test_run_id_is_free_after_job_ends_without_controller(http: Rest, shared_webhook: WebhookProcess) -> None:
    """A CronJob's next Job needs no controller. Two live Jobs never share a run, even without a CheckpointRun."""

    def cron(name: str) -> str:
        return asked(http, name, run_id="cron")

    with registered(http, shared_webhook.client_config()):
        first = http.create(job("cron-1", opted(run_id="cron")))
        assert has_sidecar(first), first.document
        assert "held by Job cron-1" in cron("cron-2"), "the Job runs and has no CheckpointRun"
        assert "delete CheckpointRun" not in cron("cron-2")
        uid = first.document["metadata"]["uid"]
        reference = {"kind": "Job", "name": "cron-1", "uid": uid, "apiVersion": "batch/v1"}
        with known(http, "cron", reference):
            assert "held by Job cron-1" in cron("cron-2"), "the Job runs and has a CheckpointRun"
            at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            conditions = [
                {"type": each, "status": "True", "lastTransitionTime": at, "reason": "x", "message": "x"}
                for each in ("FailureTarget", "Failed")
            ]
            status = {"status": {"conditions": conditions, "startTime": at}}
            assert http("PATCH", f"{JOBS}/cron-1/status", status, content=MERGE).status == 200
            second = http.create(job("cron-2", opted(run_id="cron")))
            assert has_sidecar(second), "the Job ended, whatever its CheckpointRun contains"
            assert "held by Job cron-2" in cron("cron-3")
            for name in ("cron-1", "cron-2"):
                assert http("DELETE", f"{JOBS}/{name}", {"propagationPolicy": "Background"}).status == 200
            assert not cron("cron-3"), "both Jobs are deleted"
            assert has_sidecar(http.create(job("cron-1", opted(run_id="other"))))
            assert not cron("cron-3"), "a new Job of the same name does not hold the run"
        assert http("DELETE", f"{JOBS}/cron-1", {"propagationPolicy": "Background"}).status == 200


def test_bare_pod_holds_run_until_it_ends(http: Rest, shared_webhook: WebhookProcess) -> None:
    """A bare pod is a workload, and the API is the only source of its state."""
    path = "/api/v1/namespaces/default/pods/bare"
    with registered(http, shared_webhook.client_config()):
        made = http.create(pod("bare", opted(run_id="bare")))
        assert has_sidecar(made), made.document
        with known(http, "bare", {"kind": "Pod", "name": "bare", "uid": made.document["metadata"]["uid"]}):
            assert "held by Pod bare" in asked(http, "again", run_id="bare")
            status = {"status": {"phase": "Succeeded"}}
            assert http("PATCH", f"{path}/status", status, content=MERGE).status == 200
            assert not asked(http, "again", run_id="bare")
            assert http("DELETE", path, {"gracePeriodSeconds": 0}).status == 200
            assert not asked(http, "again", run_id="bare")
