"""The resources of one scenario: its namespaces, bucket and Jobs, and the checks that all scenarios share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.cluster import LocalCluster
from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.event_server import Event, EventServer
from tests.cluster.scenario.job import JOB, TrainingJob, WorkloadType, credentials, policy, training_job
from tests.cluster.scenario.reference import Reference, checkpoints, command_line, exported, newest_step
from tests.cluster.scenario.stage import ClusterStage
from tests.cluster.trainers.model import digest_of
from tests.support.machine import limit_s
from tests.support.server.minio_server import MinioServer

ENDLESS = 1_000_000
NO_TIMER = {"deltashard.io/interval": "1h"}
"""Annotations under which no timer saves, so every commit follows from a notice."""


class ScenarioBench:
    """The resources of one scenario; the fixture of this name creates it and ends what remains."""

    def __init__(
        self,
        stage: ClusterStage,
        event_server: EventServer,
        reference: Reference,
        *,
        name: str,
        minio: MinioServer,
        folder: Path,
    ) -> None:
        self.stage, self.event_server, self.reference = stage, event_server, reference
        self.namespace = name
        self.minio = minio
        self.bucket = minio.new_bucket()
        self.namespaces: list[str] = []
        self.jobs: list[TrainingJob] = []
        self.folder = folder
        self._began_s = time.monotonic()
        self.namespace_with_store(name)

    @property
    def cluster(self) -> LocalCluster:
        return self.stage.cluster

    @property
    def url(self) -> str:
        return self.minio.url(self.bucket)

    def namespace_with_store(
        self,
        name: str,
        *,
        bucket: str = "",
        keys: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> None:
        """A namespace under PodSecurity restricted, with a Secret `store` and a CheckpointPolicy `training`."""
        api = self.cluster.api
        enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": name, "labels": enforce | dict(labels or {})}
        api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        self.namespaces.append(name)
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}}
        data = credentials(self.minio.environment if keys is None else keys)
        api.create(f"/api/v1/namespaces/{name}/secrets", {**secret, "data": data})
        self.policy(name, "training", bucket=bucket, **spec)
        wait_until(
            lambda: api.find(f"/api/v1/namespaces/{name}/serviceaccounts/default"),
            timeout_s=60,
            what=f"the service account of {name}",
        )

    def policy(self, namespace: str, name: str, *, bucket: str = "", **spec: Any) -> None:
        url, endpoint = f"s3://{bucket or self.bucket}", self.minio.endpoint
        self.cluster.api.create(
            f"/apis/deltashard.io/v1alpha1/namespaces/{namespace}/checkpointpolicies",
            policy(name, url=url, endpoint=endpoint, **spec),
        )

    def manifest(
        self,
        name: str,
        *,
        steps: int = ENDLESS,
        pace_s: float = 0.1,
        notes: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Object:
        return training_job(
            name, server=self.event_server.address, steps=steps, pace_s=pace_s, notes=notes or {}, **more
        )

    def job(self, name: str, *, namespace: str = "", **more: Any) -> TrainingJob:
        return self.applied(self.manifest(name, **more), namespace=namespace)

    def applied(self, manifest: Object, kind: WorkloadType = JOB, *, namespace: str = "") -> TrainingJob:
        place = namespace or self.namespace
        job = TrainingJob(api=self.cluster.api, namespace=place, manifest=manifest, kind=kind)
        job.apply()
        self.jobs.append(job)
        self.note(f"{job.name} applied")
        return job

    def start_event(self, job: TrainingJob, number: int, *, timeout_s: float = 240.0) -> Event:
        """Return the start event of a Job's trainer process `number`, counted from 0."""
        event = self.event_server.start_event(job.key, number, timeout_s=timeout_s)
        self.note(f"{job.name}: {number} on {event['node']} from step {event['step']} ({event['source']})")
        return event

    def wait_commits(self, job: TrainingJob, *, beyond: int = 0, count: int = 1, url: str = "") -> int:
        """Wait for `count` commits of steps after `beyond`; return the newest step."""

        def enough() -> bool:
            return sum(each.step > beyond for each in checkpoints(url or self.url, job.run)) >= count

        wait_until(
            enough, timeout_s=120, what=f"{count} commits of {job.run} beyond step {beyond}", every_s=0.3
        )
        return self.newest(job, url=url)

    def newest(self, job: TrainingJob, *, url: str = "") -> int:
        return newest_step(url or self.url, job.run)

    def assert_resumed(self, event: Event, *, at_least: int = 1) -> None:
        """Assert that the trainer resumed from exactly the state of the uninterrupted training at that step."""
        assert event["step"] >= at_least, event
        assert event["exact"] is True
        assert event["digest"] == self.reference.digest(event["step"])

    def assert_graceful_exit(
        self, job: TrainingJob, start: Event, number: int, remove: Callable[[], object]
    ) -> Event:
        """Assert that a removed pod commits in its grace period, so that the next one loses at most one step.

        `start` is the pod's start event; `remove` starts the removal. Return the next start event, number `number`.
        """
        self.event_server.wait_step(start["process"], start["step"] + 30, timeout_s=120)
        remove()
        job.wait_gone(start["pod"], timeout_s=90)
        done = self.event_server.last_step(start["process"])
        self.note(f"{start['pod']} left at step {done}")
        assert self.newest(job) >= done - 1
        successor = self.start_event(job, number)
        assert successor["pod"] != start["pod"]
        self.assert_resumed(successor, at_least=done - 1)
        return successor

    def assert_store_whole(self, job: TrainingJob, *, url: str = "") -> None:
        """Assert that every byte of the run is valid, and its newest checkpoint is the reference's state at that step."""
        url = url or self.url
        command_line("verify", url, "--run", job.run, "--deep")
        step, found = exported(url, job.run, self.folder)
        weights = {name: found[name] for name in self.reference.names}
        assert digest_of(weights) == self.reference.weights_digest(step), f"step {step}"

    def reclaimed(self, job: TrainingJob, state: str) -> Object:
        """Wait until the removal reaches `state`; return its status in the CheckpointRun."""
        status = job.wait_status(state, lambda run: (run.get("reclaim") or {}).get("state") == state)
        self.note(f"{job.name}: {status['reclaim']}")
        return dict(status["reclaim"])

    def plugin(self, *arguments: str | Path, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "deltashard_cli.kubectl.plugin", *arguments, "-n", self.namespace,
             f"--kubeconfig={self.cluster.kubeconfig}"],
            capture_output=True, text=True, timeout=limit_s(240), check=False,
        )  # fmt: skip
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def note(self, what: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s  {what}")

    def clear(self) -> None:
        """Delete everything; the namespaces end in the background, their pods at once."""
        for name in self.namespaces:
            api = self.cluster.api
            with contextlib.suppress(Exception):
                for kind in {job.kind for job in self.jobs}:
                    path = f"{kind.api}/namespaces/{name}/{kind.plural}"
                    api.call("DELETE", f"{path}?propagationPolicy=Background")
                api.call("DELETE", f"/api/v1/namespaces/{name}/pods?gracePeriodSeconds=1")
            api.delete(f"/api/v1/namespaces/{name}")
