"""Annotated Jobs and pods admitted at a steady rate, as dry runs: through the real API server to the real webhook."""

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
    """What came of them."""

    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """As the client saw them, whole requests."""
    failures: list[str] = field(default_factory=list)
    max_lateness_s: float = 0.0
    """How far the worst request began after its time: the rate was held when this is small."""
    webhook: measure.Histogram = field(default_factory=lambda: measure.Histogram(bounds=()))
    """The webhook's own seconds of each."""
    hooks: measure.Histogram = field(default_factory=lambda: measure.Histogram(bounds=()))
    """The API server's seconds of calling the webhook."""


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
    """As many a second for so long, one in two a Job; `webhook_page` gives the webhook's metrics.

    The rate is kept whatever the answers take: a slow answer delays none but those that find every thread busy.
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
                time.sleep(early_s)  # the rate is what is asked for
            document = (
                workload.job(f"asked-{number}", pods=1, node="node-0")
                if number % 2
                else _pod(f"asked-{number}")
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
