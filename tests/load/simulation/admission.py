"""Annotated Jobs and pods admitted at a steady rate as dry runs, by the real API server and webhook."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from deltashard_operator.kube import cluster_name

from tests.load.simulation import measure, workload
from tests.load.simulation.control_plane import ControlPlane

THREADS = 16
HOOKS = ("jobs.deltashard.io", "pods.deltashard.io")


@dataclass(slots=True)
class AdmissionResult:
    """Latencies and failures of the admissions."""

    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Seconds of whole requests, as the client measures them."""
    failures: list[str] = field(default_factory=list)
    max_lateness_s: float = 0.0
    """The largest delay of a request's start; a small value means that the rate was held."""
    webhook: measure.Histogram = field(default_factory=lambda: measure.Histogram(bounds=()))
    """Seconds that the webhook measures."""
    hooks: measure.Histogram = field(default_factory=lambda: measure.Histogram(bounds=()))
    """Seconds of webhook calls that the API server measures."""


def _pod(name: str) -> dict[str, Any]:
    template = workload.job(name, pods=1, node="node-0")["spec"]["template"]
    owner = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": "online",
        "uid": "u-1",
        "controller": True,
    }
    metadata = {"name": name, "annotations": {cluster_name.POLICY: "default"}, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _hook_latencies(page: str) -> measure.Histogram:
    name = "apiserver_admission_webhook_admission_duration_seconds"
    both = [dict(measure.histogram(page, name, name=hook).bounds) for hook in HOOKS]
    return measure.Histogram(
        bounds=[(bound, sum(each.get(bound, 0.0) for each in both)) for bound in sorted(set().union(*both))]
    )


def admit(plane: ControlPlane, webhook_page: Any, *, per_s: float, duration_s: float) -> AdmissionResult:
    """Admit `per_s` objects a second for `duration_s`, alternating Jobs and pods. `webhook_page` gives metrics.

    A slow answer does not reduce the rate; only requests that find every thread busy are delayed.
    """
    outcome = AdmissionResult()
    lock = threading.Lock()
    numbers = itertools.count()
    total = int(per_s * duration_s)
    webhook_name = "deltashard_webhook_admission_seconds"
    before = measure.histogram(webhook_page(), webhook_name), _hook_latencies(plane.metrics())
    begun_s = time.monotonic()

    def work() -> None:
        while (number := next(numbers)) < total:
            due_s = begun_s + number / per_s
            if (early_s := due_s - time.monotonic()) > 0:
                time.sleep(early_s)  # fixed times hold the rate
            document = (
                workload.job(f"job-{number}", pods=1, node="node-0") if number % 2 else _pod(f"job-{number}")
            )
            sent_s = time.monotonic()
            reply = plane.rest.create(document, dry_run=True)
            took_s = time.monotonic() - sent_s
            spec = reply.document.get("spec", {})
            inits = spec.get("template", {"spec": spec})["spec"].get("initContainers") or []
            with lock:
                outcome.latencies_s.append(took_s)
                outcome.max_lateness_s = max(outcome.max_lateness_s, sent_s - due_s)
                if reply.status != 201 or [c["name"] for c in inits] != [cluster_name.SIDECAR]:
                    outcome.failures.append(f"{reply.status}: {reply.document.get('message', 'no sidecar')}")

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.elapsed_s = time.monotonic() - begun_s
    outcome.webhook = measure.histogram(webhook_page(), webhook_name).since(before[0])
    outcome.hooks = _hook_latencies(plane.metrics()).since(before[1])
    return outcome
