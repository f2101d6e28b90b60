"""Store failures: the cluster reports them, and training neither stops nor loses steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from deltashard_operator.kube.cluster_name import USER_ID

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.event_server import Event
from tests.cluster.scenario.job import TrainingJob, credentials
from tests.cluster.scenario.tenant import Tenant
from tests.support.server.minio_server import MinioServer
from tests.support.server.minio_user import admin_of

pytestmark = pytest.mark.timeout(600, func_only=True)


def assert_store_problem(
    bench: ScenarioBench,
    job: TrainingJob,
    start: Event,
    *,
    condition: str,
    message: str,
    begin: Callable[[], object],
    end: Callable[[], object],
    hold_s: float = 0.0,
) -> None:
    at_begin = bench.event_server.last_step(start["process"])
    began_s = time.monotonic()
    begin()
    reported = job.wait_condition(condition, timeout_s=120)
    assert message.lower() in reported["message"].lower(), reported
    job.wait_event(condition)
    bench.note(f"{condition}: {reported['message']}")
    wait_until(lambda: time.monotonic() > began_s + hold_s, timeout_s=hold_s + 60, what="the outage's length")
    bench.event_server.wait_step(start["process"], at_begin + 1, timeout_s=60)  # training continues
    at_end = bench.event_server.last_step(start["process"])
    end()
    bench.wait_commits(job, beyond=at_end)
    job.wait_condition(condition, "False")
    bench.note(f"{condition} is over")


def test_store_problems_fail_saves(bench: ScenarioBench, own_bridge_minio: MinioServer, full: bool) -> None:
    minio, namespace = own_bridge_minio, f"{bench.namespace}-tenant"
    old, new = Tenant(minio, bench.bucket), Tenant(minio, bench.bucket)
    bench.namespace_with_store(namespace, keys=old.environment)
    job = bench.job("store-problems", namespace=namespace)
    start = bench.start_event(job, 0)
    bench.wait_commits(job, count=2)

    def restart_store() -> None:
        minio.start()
        bench.cluster.register_process("own-minio", minio.pid)

    assert_store_problem(
        bench, job, start, condition="StoreUnavailable", message=minio.endpoint.removeprefix("http://"),
        begin=minio.stop, end=restart_store, hold_s=120.0 if full else 30.0,
    )  # fmt: skip

    def put(data: dict[str, str]) -> None:
        path = f"/api/v1/namespaces/{namespace}/secrets/store"
        bench.cluster.api.patch(path, {"data": data})

    def rotate() -> None:
        put(credentials(new.environment))

    assert_store_problem(
        bench,
        job,
        start,
        condition="StoreUnavailable",
        message="InvalidAccessKeyId",
        begin=old.revoke_keys,
        end=rotate,
    )
    refused = job.wait_event("SaveFailed")
    assert start["pod"] in refused["message"], refused
    bench.note(f"SaveFailed: {refused['message']}")
    assert_store_problem(
        bench, job, start, condition="CredentialsMissing", message="create the Secret",
        begin=lambda: put({"credentials": ""}), end=rotate,
    )  # fmt: skip
    admin = admin_of(minio)
    assert_store_problem(
        bench, job, start, condition="StoreUnavailable", message="quota",
        begin=lambda: admin.bucket_quota_set(bench.bucket, 1),
        end=lambda: admin.bucket_quota_clear(bench.bucket),
    )  # fmt: skip
    assert job.container(start["pod"], "trainer")["restartCount"] == 0
    job.delete_pod(start["pod"])
    successor = bench.start_event(job, 1)
    bench.assert_resumed(successor, at_least=bench.event_server.last_step(start["process"]) - 1)
    bench.assert_store_whole(job)


def test_saves_begin_once_bucket_exists(bench: ScenarioBench) -> None:
    bucket = f"{bench.bucket}-later"
    bench.policy(bench.namespace, "later", bucket=bucket)
    path = f"/apis/deltashard.io/v1alpha1/namespaces/{bench.namespace}/checkpointpolicies/later"

    def policy() -> dict[str, str]:
        status = bench.cluster.api.get(path).get("status") or {}
        return {each["type"]: each["status"] for each in status.get("conditions", ())}

    job = bench.job("early", notes={"deltashard.io/policy": "later"})
    reported = job.wait_condition("StoreUnavailable", timeout_s=120)
    assert bucket in reported["message"], reported
    bench.note(reported["message"])
    wait_until(
        lambda: policy() == {"Ready": "False"},
        timeout_s=90,
        what=lambda: f"the policy reports it: {policy()}",
    )
    client = bench.minio.client()
    client.make_bucket(bucket)
    url = bench.minio.url(bucket)
    bench.start_event(job, 0)
    bench.wait_commits(job, count=1, url=url)
    job.wait_condition("StoreUnavailable", "False")
    wait_until(
        lambda: policy() == {"Ready": "True"}, timeout_s=90, what=lambda: f"the policy is ready: {policy()}"
    )
    bench.assert_store_whole(job, url=url)


def test_store_on_volume_claim(bench: ScenarioBench) -> None:
    """On a volume that all nodes share, a run resumes in its next pod, and the removal deletes its files."""
    folder, api, name = bench.folder / "volume", bench.cluster.api, bench.namespace
    folder.mkdir(mode=0o700)
    os.chown(folder, USER_ID, USER_ID)
    shared = {"storageClassName": "", "accessModes": ["ReadWriteMany"]}
    volume: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {**shared, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}},
    }
    claim: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "checkpoints"},
        "spec": {**shared, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}},
    }
    api.create("/api/v1/persistentvolumes", volume)
    try:
        api.create(f"/api/v1/namespaces/{name}/persistentvolumeclaims", claim)
        store = {"url": "file:///mnt/shared/training", "claim": "checkpoints"}
        bench.policy(name, "claimed", store=store, reclaim={"policy": "Delete", "after": "0s"})
        job = bench.job("claimed", steps=400, notes={"deltashard.io/policy": "claimed"})
        start = bench.start_event(job, 0)
        bench.wait_commits(job, count=2, url=f"file://{folder}/training")
        job.delete_pod(start["pod"])
        successor = bench.start_event(job, 1)
        bench.assert_resumed(successor, at_least=bench.event_server.last_step(start["process"]) - 1)
        job.wait_complete()
        bench.reclaimed(job, "Removed")
        assert not [each for each in folder.rglob("*") if each.is_file()]
    finally:
        api.delete(f"/api/v1/persistentvolumes/{name}")
