"""All of it together: cluster, controller, webhook, annotated Jobs, a sidecar for every pod, and someone who watches."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from tests.load.simulation import audit, control_plane, measure, workload
from tests.load.simulation import view as views
from tests.load.simulation.control_plane import CONTROLLER, Plane
from tests.load.simulation.operator_process import Controller, Webhook
from tests.load.simulation.process import Usage, usage
from tests.load.simulation.swarm import Member, Swarm
from tests.load.simulation.workload import Pod
from tests.support.eventually import eventually

NAMESPACES = tuple(f"team-{number}" for number in range(5))


class System:
    """A cluster that trains runs of these sizes, in pods; use as a context manager."""

    def __init__(
        self, folder: Path, *, sizes: Sequence[int], nodes: int, every_s: float, processes: int = 1
    ) -> None:
        self.sizes, self.every_s = tuple(sizes), every_s
        self.runs, self.pods = len(self.sizes), sum(self.sizes)
        self.took_s: dict[str, float] = {}
        self.controller_after: dict[str, Usage] = {}
        """What the controller used by the end of each stage."""
        self.swarms: list[Swarm] = []
        self.plane = Plane(folder, nodes=nodes, interval_s=every_s)
        self._processes = processes
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as closing:
            with self._timed("cluster"):
                closing.callback(self.plane.stop)
                self.plane.start()
            with self._timed("controller and webhook"):
                self.controller = Controller(self.plane)
                closing.callback(self.controller.stop)
                self.controller.start()
                self.webhook = Webhook(self.plane)
                closing.callback(self.webhook.stop)
                self.webhook.start()
            with self._timed("pods running"):
                workload.make(self.plane, NAMESPACES, self.sizes)
            self.view = closing.enter_context(views.Runs(self.plane))
            trusted = self.controller.fleet_authority()
            for number in range(self._processes):
                swarm = Swarm(
                    self.plane.folder,
                    name=f"sidecars-{number}",
                    port=self.controller.fleet_port,
                    trusted=trusted,
                    every_s=self.every_s,
                )
                closing.callback(swarm.stop)
                self.swarms.append(swarm)
            with self._timed("tokens made"):
                members = workload.members(self.plane, workload.living(self.plane), self.sizes)
            assert len(members) == self.pods
            with self._timed("sidecars connected"):
                self._add(members, within_s=self.pods / 250)
                self.wait_streams(self.pods)
            with self._timed("runs training"):
                self.view.wait_training(self.runs, timeout_s=control_plane.PATIENCE_S + self.pods / 20)
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

    def streams(self) -> int:
        """Sidecars that the controller has on its books."""
        _, page = self.controller.get("metrics")
        return int(measure.value(page, "deltashard_fleet_streams"))

    def wait_streams(self, number: int) -> float:
        """Until it has so many; returns how long that took."""
        begun_s = time.monotonic()

        def all_here() -> bool:
            self.controller.process.check()
            return self.streams() == number

        try:
            eventually(
                all_here,
                what=f"{number} sidecars",
                timeout_s=control_plane.PATIENCE_S + number / 10,
                every_s=0.2,
            )
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.told()}\n{self.controller.process.tail()}") from None
        return time.monotonic() - begun_s

    def told(self) -> dict[str, Any]:
        """What became of the sidecars, all processes together."""
        told: dict[str, Any] = {}
        for report in (swarm.report() for swarm in self.swarms):
            for key, value in report.items():
                if isinstance(value, dict):
                    had = told.setdefault(key, {})
                    for name, count in value.items():
                        had[name] = had.get(name, 0) + count
                else:
                    told[key] = told.get(key, type(value)()) + value
        return told

    def usages(self) -> dict[str, Usage]:
        """What every program has used so far."""
        found = {name: usage(pid) for name, pid in self.plane.apiserver.pids.items()}
        for each in (
            self.plane.job_controller,
            self.plane.kwok,
            self.controller.process,
            self.webhook.process,
        ):
            found[each.name] = each.usage()
        for number, swarm in enumerate(self.swarms):
            found[f"sidecars-{number}"] = usage(swarm.pid)
        return found

    def restart(self) -> dict[str, float]:
        """Kill the controller without a word, start another, and wait until every sidecar is back; seconds of each."""
        self.controller.process.kill()
        begun_s = time.monotonic()
        self.controller.start()
        started_s = time.monotonic() - begun_s
        self.wait_streams(self.pods)
        streams_s = time.monotonic() - begun_s
        self.view.wait_training(self.runs)
        return {"ready": started_s, "sidecars back": streams_s, "runs training": time.monotonic() - begun_s}

    def lose(self, victims: Sequence[Pod], how: Callable[[Plane, Pod], None]) -> dict[str, float]:
        """Lose one pod of each of some runs, wait until every status tells it, and let its successor train.

        Returns, by pod UID, the seconds from the API's word that the pod is lost to the status that tells it.
        """
        lost_at_s: dict[str, float] = {}

        def end(pod: Pod) -> None:
            how(self.plane, pod)
            lost_at_s[pod.uid] = time.monotonic()

        uids = [pod.uid for pod in victims]
        for number, swarm in enumerate(self.swarms):
            swarm.remove([uid for uid in uids if self._owner(uid) == number])
        workload.in_threads(end, victims)
        self.view.wait(
            lambda view: all(view.lost_at_s(uid) is not None for uid in uids),
            f"{len(uids)} losses in statuses",
            timeout_s=control_plane.PATIENCE_S,
        )
        seconds = {uid: (self.view.lost_at_s(uid) or 0.0) - lost_at_s[uid] for uid in uids}
        self._replace({(pod.namespace, pod.job, pod.index) for pod in victims}, set(uids))
        return seconds

    def _replace(self, places: set[tuple[str, str, str]], gone: set[str]) -> None:
        found: list[Pod] = []

        def replaced() -> bool:
            found[:] = [
                pod
                for pod in workload.living(self.plane)
                if (pod.namespace, pod.job, pod.index) in places and pod.uid not in gone
            ]
            return len(found) == len(places)

        eventually(
            replaced, what=f"{len(places)} replacements", every_s=0.5, timeout_s=control_plane.PATIENCE_S
        )
        members = workload.members(self.plane, found, self.sizes, restored=True)
        for swarm in self.swarms:
            swarm.reopen({member.workload_uid for member in members})
        self._add(members, within_s=1.0)

    def _owner(self, uid: str) -> int:
        """Which process has the sidecar of a pod."""
        return zlib.crc32(uid.encode()) % len(self.swarms)

    def _add(self, members: Sequence[Member], *, within_s: float) -> None:
        for number, swarm in enumerate(self.swarms):
            swarm.add([each for each in members if self._owner(each.uid) == number], within_s=within_s)

    def findings(self) -> list[str]:
        """What the controller did and should not have done."""
        return audit.findings(self._asked())

    def requests(self) -> dict[str, int]:
        """What the controller asked the API for, so far."""
        return audit.counts(self._asked())

    def _asked(self) -> Iterator[audit.Request]:
        return audit.requests(self.plane.audit_log, control_plane.account(CONTROLLER))
