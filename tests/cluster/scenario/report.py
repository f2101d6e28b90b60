"""The report of a failed scenario: events, pods, runs, and the end of every container's log."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.cluster.kubernetes.api import Object
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.system import NAMESPACE

_TAIL_BYTES = 6000


def sections(bench: ScenarioBench) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for make in (_events, _pods, _runs, _logs):
        try:
            found += make(bench)
        except Exception as error:  # an error in the report must not hide the failure
            found.append((make.__name__, f"could not be read: {error}"))
    return found


def _events(bench: ScenarioBench) -> Iterator[tuple[str, str]]:
    for namespace in (*bench.namespaces, NAMESPACE):
        events = bench.cluster.api.items(f"/api/v1/namespaces/{namespace}/events")
        lines = [
            f"{each.get('lastTimestamp') or each.get('eventTime')} {each['involvedObject']['kind']} "
            f"{each['involvedObject']['name']} {each['reason']}: {each.get('message')}"
            for each in events
        ]
        yield f"events of {namespace}", "\n".join(sorted(lines))


def _brief(pod: Object) -> str:
    status = pod["status"]
    containers = [
        f"{each['name']}: {json.dumps(each['state'])} restarts {each['restartCount']}"
        for each in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    ]
    where = f"{pod['metadata']['name']} on {pod['spec'].get('nodeName')} {status.get('phase')}"
    return "\n  ".join([where, *containers])


def _pods(bench: ScenarioBench) -> Iterator[tuple[str, str]]:
    for namespace in (*bench.namespaces, NAMESPACE):
        pods = bench.cluster.api.items(f"/api/v1/namespaces/{namespace}/pods")
        yield f"pods of {namespace}", "\n".join(map(_brief, pods))


def _runs(bench: ScenarioBench) -> Iterator[tuple[str, str]]:
    for namespace in bench.namespaces:
        path = f"/apis/deltashard.io/v1alpha1/namespaces/{namespace}/checkpointruns"
        yield f"runs of {namespace}", json.dumps(bench.cluster.api.items(path), indent=1)


def _logs(bench: ScenarioBench) -> Iterator[tuple[str, str]]:
    for node in bench.cluster.nodes.values():
        for namespace in (*bench.namespaces, NAMESPACE):
            for log in sorted(node.logs.glob(f"{namespace}_*/*/*.log")):
                yield f"{node.name} {log.relative_to(node.logs)}", _tail(log.read_text(errors="replace"))


def _tail(text: str) -> str:
    return text[-_TAIL_BYTES:]
