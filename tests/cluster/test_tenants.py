"""Several users of one cluster, and one user's Jobs that pause, end, and restart."""

from __future__ import annotations

import secrets

import pytest

from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.tenant import Tenant

pytestmark = pytest.mark.timeout(600, func_only=True)


def test_tenants_save_by_their_own_policy(bench: ScenarioBench) -> None:
    other_bucket = bench.minio.new_bucket()
    tenants = [Tenant(bench.minio, bucket) for bucket in (bench.bucket, other_bucket)]
    names = [f"{bench.namespace}-{each}" for each in ("one", "two")]
    policies: list[dict[str, object]] = [
        {"interval": {"every": "1s"}},
        {"interval": {"every": "0s", "everySteps": 20}},
    ]
    for name, tenant, spec in zip(names, tenants, policies, strict=True):
        bench.namespace_with_store(name, bucket=tenant.bucket, keys=tenant.environment, **spec)
    jobs = [bench.job("train", namespace=name) for name in names]
    urls = [bench.minio.url(tenant.bucket) for tenant in tenants]
    starts = [bench.start_event(job, 0) for job in jobs]
    for job, url in zip(jobs, urls, strict=True):
        bench.wait_commits(job, count=2, url=url)
    statuses = [job.wait_status("how it saves", lambda run: "lastCommittedStep" in run) for job in jobs]
    timers = [(status.get("intervalSeconds", 0), status.get("everySteps", 0)) for status in statuses]
    assert timers == [(1, 0), (0, 20)], "a run saves by another policy"
    for job, start in zip(jobs, starts, strict=True):
        job.delete_pod(start["pod"])
    for job, url, start in zip(jobs, urls, starts, strict=True):
        successor = bench.start_event(job, 1)
        assert successor["source"] == "store"
        bench.assert_resumed(successor, at_least=bench.event_server.last_step(start["process"]) - 1)
        bench.assert_store_whole(job, url=url)
    client = bench.minio.client()
    for job, tenant in zip(jobs, tenants, strict=True):
        objects = [each.object_name for each in client.list_objects(tenant.bucket, recursive=True)]
        assert objects
        assert all(job.namespace in name for name in objects), "another run's object"


def test_suspend_and_recreate_job(bench: ScenarioBench) -> None:
    """`suspend` and resume continue the run; the same name again is a new run, unless `run-id` names the old one."""
    name = f"train-{secrets.token_hex(2)}"
    job = bench.job(name, spec={"suspend": True})
    job.patch({"spec": {"suspend": False}})
    start = bench.start_event(job, 0)
    bench.wait_commits(job, count=1)
    job.patch({"spec": {"suspend": True}})
    job.wait_gone(start["pod"], timeout_s=60)
    done = bench.event_server.last_step(start["process"])
    assert bench.newest(job) >= done - 1
    job.patch({"spec": {"suspend": False}})
    second = bench.start_event(job, 1)
    bench.assert_resumed(second, at_least=done - 1)
    assert str(second["step"]) in job.wait_event("Restored")["message"]

    job.delete()
    done = bench.event_server.last_step(second["process"])
    assert bench.newest(job) >= done - 1
    again = bench.job(name)
    assert again.uid != job.uid
    third = bench.start_event(again, 2)
    assert third["step"] == 0, "a new run"
    assert job.run_id in again.wait_event("RunReplaced")["message"]
    again.delete()

    continued = bench.job(name, notes={"deltashard.io/run-id": job.run_id})
    fourth = bench.start_event(continued, 3)
    bench.assert_resumed(fourth, at_least=done - 1)
    wait_until(lambda: bench.newest(job) > fourth["step"], timeout_s=60, what="the old run continues")
    bench.assert_store_whole(job)
