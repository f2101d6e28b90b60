"""The whole simulation: cluster, controller, webhook, annotated Jobs, a sidecar for every pod, and a watch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from tests.load.simulation import audit, control_plane, workload
from tests.load.simulation import view as views
from tests.load.simulation.control_plane import CONTROLLER, ControlPlane
from tests.load.simulation.operator_process import LoadController, LoadWebhook
from tests.load.simulation.process import Usage, usage
from tests.load.simulation.swarm import Swarm
from tests.load.simulation.workload import ClusterPod
from tests.support.eventually import eventually

NAMESPACES = tuple(f"team-{number}" for number in range(5))
ARRIVALS_PER_S = 100
"""Sidecars started per second by `__enter__`."""


class LoadSystem:
    """A cluster that trains runs of these sizes in pods; use as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        sizes: Sequence[int],
        nodes: int,
        every_s: float,
        make: Callable[[ControlPlane, Sequence[str], Sequence[int]], None] = workload.make,
    ) -> None:
        self.sizes, self.every_s, self._make = tuple(sizes), every_s, make
        self.runs, self.pods = len(self.sizes), sum(self.sizes)
        self.took_s: dict[str, float] = {}
        self.controller_after: dict[str, Usage] = {}
        """Resource usage of the controller by the end of each stage."""
        self.plane = ControlPlane(folder, nodes=nodes, interval_s=every_s)
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as closing:
            with self._timed("cluster"):
                closing.callback(self.plane.stop)
                self.plane.start()
            with self._timed("controller and webhook"):
                self.controller = LoadController(self.plane)
                closing.callback(self.controller.stop)
                self.controller.start()
                self.webhook = LoadWebhook(self.plane)
                closing.callback(self.webhook.stop)
                self.webhook.start()
            with self._timed("pods running"):
                self._make(self.plane, NAMESPACES, self.sizes)
            self.view = closing.enter_context(views.RunWatcher(self.plane))
            self.swarm = Swarm(
                self.plane.folder,
                name="sidecars",
                port=self.controller.fleet_port,
                nudge_port=self.plane.nudge_port,
                trusted=self.controller.fleet_authority(),
                every_s=self.every_s,
            )
            closing.callback(self.swarm.stop)
            with self._timed("tokens made"):
                members = workload.members(self.plane, workload.live_pods(self.plane), self.sizes)
            assert len(members) == self.pods
            with self._timed("sidecars reported"):
                self.swarm.add(members, within_s=self.pods / ARRIVALS_PER_S)
                self.wait_reported(self.pods)
            with self._timed("runs training"):
                self.view.wait_training(self.runs, timeout_s=control_plane.TIMEOUT_S + self.pods / 20)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun_s = time.monotonic()
        yield
        self.took_s[what] = round(time.monotonic() - begun_s, 1)
        if what != "cluster":
            self.controller_after[what] = self.controller.usage()

    def wait_reported(self, number: int, what: str = "accepted") -> None:
        """Wait until reports of this many sidecars (or `reporters` among them) were accepted since the mark."""

        def reported() -> bool:
            self.controller.process.check()
            return self.swarm.report()[what] >= number

        try:
            eventually(
                reported,
                what=f"{number} sidecars",
                timeout_s=control_plane.TIMEOUT_S + number / 10,
                every_s=0.2,
            )
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.swarm.report()}\n{self.controller.process.tail()}") from None

    def usages(self) -> dict[str, Usage]:
        found = {name: usage(pid) for name, pid in self.plane.apiserver.pids.items()}
        for each in (
            self.plane.job_controller,
            self.plane.kwok,
            self.controller.process,
            self.webhook.process,
        ):
            found[each.name] = each.usage()
        found["sidecars"] = usage(self.swarm.pid)
        return found

    def restart(self) -> dict[str, float]:
        """Kill the controller, start another, wait until every run has reported; returns each stage's seconds."""
        self.controller.process.kill()
        self.swarm.mark()
        begun_s = time.monotonic()
        self.controller.start()
        started_s = time.monotonic() - begun_s
        self.wait_reported(self.runs, "reporters")
        reported_s = time.monotonic() - begun_s
        self.view.wait_training(self.runs)
        return {
            "ready": started_s,
            "every run reported": reported_s,
            "runs training": time.monotonic() - begun_s,
        }

    def request_saves(self, pods: Sequence[ClusterPod]) -> tuple[dict[str, float], dict[str, float]]:
        """Request a save of each pod's run; returns the seconds to its sidecar and to its end, by request."""
        asked_at_s: dict[str, float] = {}
        root = "/apis/deltashard.io/v1alpha1"

        def request_save(pod: ClusterPod) -> None:
            at_s = time.time()
            request = {
                "apiVersion": "deltashard.io/v1alpha1",
                "kind": "CheckpointRequest",
                "metadata": {"generateName": "now-"},
                "spec": {"runRef": {"name": f"{pod.job}-{pod.job_uid}"}, "urgent": True},
            }
            path = f"{root}/namespaces/{pod.namespace}/checkpointrequests"
            reply = self.plane.rest("POST", path, request)
            assert reply.status == 201, reply.document
            asked_at_s[reply.document["metadata"]["uid"]] = at_s

        workload.in_threads(request_save, pods)
        ended_at_s: dict[str, float] = {}

        def completed() -> bool:
            for each in control_plane.objects(self.plane.rest, f"{root}/checkpointrequests"):
                phase = (each.get("status") or {}).get("phase")
                assert phase != "Failed", each
                if phase == "Completed":
                    ended_at_s.setdefault(each["metadata"]["uid"], time.time())
            return asked_at_s.keys() <= ended_at_s.keys()

        eventually(completed, what=f"{len(pods)} saves", every_s=0.2, timeout_s=control_plane.TIMEOUT_S)
        received_at_s_by_id = self.swarm.report()["received_at_s"]
        return (
            {uid: received_at_s_by_id[uid] - at_s for uid, at_s in asked_at_s.items()},
            {uid: ended_at_s[uid] - at_s for uid, at_s in asked_at_s.items()},
        )

    def lose(
        self, victims: Sequence[ClusterPod], end_pod: Callable[[ControlPlane, ClusterPod], None]
    ) -> dict[str, float]:
        """Lose one pod of each of some runs, wait until every status reports the loss, and let the successor train.

        Returns, by pod, the seconds between the loss in the API and its appearance in the status.
        """
        lost_at_s: dict[str, float] = {}

        def end(pod: ClusterPod) -> None:
            end_pod(self.plane, pod)
            lost_at_s[pod.name] = time.monotonic()

        uids = [pod.uid for pod in victims]
        self.swarm.remove(uids)
        workload.in_threads(end, victims)
        self.view.wait(
            lambda view: all(view.lost_at_s(name) is not None for name in lost_at_s),
            f"{len(uids)} losses in statuses",
            timeout_s=control_plane.TIMEOUT_S,
        )
        seconds = {name: (self.view.lost_at_s(name) or 0.0) - at_s for name, at_s in lost_at_s.items()}
        self._replace({(pod.namespace, pod.job, pod.index) for pod in victims}, set(uids))
        return seconds

    def _replace(self, places: set[tuple[str, str, str]], lost_uids: set[str]) -> None:
        found: list[ClusterPod] = []

        def replaced() -> bool:
            found[:] = [
                pod
                for pod in workload.live_pods(self.plane)
                if (pod.namespace, pod.job, pod.index) in places and pod.uid not in lost_uids
            ]
            return len(found) == len(places)

        eventually(
            replaced, what=f"{len(places)} replacements", every_s=0.5, timeout_s=control_plane.TIMEOUT_S
        )
        members = workload.members(self.plane, found, self.sizes, restored=True)
        self.swarm.reopen({member.workload_uid for member in members})
        self.swarm.add(members, within_s=1.0)

    def violations(self) -> list[str]:
        return audit.violations(self._audited_requests())

    def requests(self) -> dict[str, int]:
        return audit.counts(self._audited_requests())

    def _audited_requests(self) -> Iterator[audit.AuditedRequest]:
        return audit.requests(self.plane.audit_log, control_plane.account(CONTROLLER))
