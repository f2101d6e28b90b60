"""A pod is preempted: it saves in its grace period, and its successor resumes from that step."""

from __future__ import annotations

import pytest

from tests.cluster.kubernetes.api import KubeApi, Object
from tests.cluster.kubernetes.image import TAG, TRAINER
from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import NO_TIMER, ScenarioBench
from tests.cluster.scenario.job import RESTRICTED

pytestmark = pytest.mark.timeout(600, func_only=True)

SLOT = "deltashard.test/slot"
"""An extended resource: one per node, so two pods that request it cannot share a node."""


@pytest.fixture
def slots(bench: ScenarioBench) -> None:
    for name, node in bench.cluster.nodes.items():
        if not node.pool:
            change = [{"op": "add", "path": f"/status/capacity/{SLOT.replace('/', '~1')}", "value": "1"}]
            path = f"/api/v1/nodes/{name}/status"
            bench.cluster.api.patch(path, change, "json")
            wait_until(
                lambda name=name: (
                    SLOT in bench.cluster.api.get(f"/api/v1/nodes/{name}")["status"]["allocatable"]
                ),
                timeout_s=60,
                what=f"a slot on {name}",
            )


def test_preempted_pod_saves_in_grace_period(bench: ScenarioBench, slots: None) -> None:
    """The pod commits an urgent snapshot; test_groups covers eviction and deletion."""
    requests = {"cpu": "10m", "memory": "512Mi", SLOT: "1"}
    limits = {"memory": "2Gi", SLOT: "1"}
    job = bench.job(
        "preempted", notes=NO_TIMER, container={"resources": {"requests": requests, "limits": limits}}
    )
    start = bench.start_event(job, 0)
    successor = bench.assert_graceful_exit(
        job, start, 1, lambda: preempt(bench.cluster.api, bench.namespace, start["node"])
    )
    assert successor["node"] != start["node"]
    bench.assert_store_whole(job)


def preempt(api: KubeApi, namespace: str, node: str) -> None:
    """Create a pod with a higher priority that takes the node's only slot."""
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    if api.find(f"{classes}/high-priority") is None:
        document = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
        api.create(classes, {**document, "metadata": {"name": "high-priority"}})
    container = {
        "name": "sleeper",
        "image": f"{TRAINER}:{TAG}",
        "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"],
        "resources": {"requests": {SLOT: "1"}, "limits": {SLOT: "1"}},
        "securityContext": RESTRICTED,
    }
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "high-priority"},
        "spec": {
            "priorityClassName": "high-priority",
            "nodeSelector": {"kubernetes.io/hostname": node},
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
        },
    }
    api.create(f"/api/v1/namespaces/{namespace}/pods", pod)
