"""The real code of both sides of reports, under random schedules of every event that may occur between them.

The code under test is the controller's (counts, notices, writes, orders) and the sidecar's (its client, its
incidents, its orders). Between them are a network that loses calls, delivers them late and twice, and loses answers;
an API that fails before or after a write, or answers late; and up to two controllers that both act as
leader. Controllers and sidecars end and start again at any moment. A schedule is its seed, and repeats exactly.

Invariants (`ReportWorld.check`, `ReportWorld.finish`): no restore is counted twice, at any time; a late report changes
nothing; no ordered save is made twice; and once the faults end, every restore and its lost steps are counted, every
incident has one Event for each object, no sidecar keeps an incident, every sidecar follows the newest policy, and
every request is completed.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml
from deltashard_checkpoint.vocabulary import ORDERS_KEY
from deltashard_operator.controller import writer
from deltashard_operator.controller.controller import Controller
from deltashard_operator.fleet import report as reports
from deltashard_operator.kube.call import ApiResponse, ApiUnavailable
from deltashard_operator.run.observed_object import timestamp
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_sidecar.fleet.report_client import ReportClient
from deltashard_sidecar.save_orders import SaveOrders
from deltashard_sidecar.telemetry.incident import Incidents
from structlog.testing import capture_logs

from tests.support.operator import sample
from tests.support.operator.controller_api import UID, controller_of, job, pod

NAMES = ("train-0", "train-1")
RUNS, REQUESTS = "/apis/deltashard.io/v1alpha1/namespaces/n/checkpointruns", "checkpointrequests"
RUN = f"{RUNS}/train-0b4f3c1e"
MOVES = {
    "report": 30, "tick": 30, "answer": 15, "restore": 6, "incident": 6, "snapshot": 4, "commit": 4, "policy": 2,
    "request": 1, "late": 6, "restart_sidecar": 2, "restart_controller": 2, "second_controller": 3, "one_controller": 1,
}  # fmt: skip


class ReportViolation(AssertionError):
    """An invariant does not hold."""


class VersionedApi:
    """Objects by their path, each with a version."""

    def __init__(self, world: ReportWorld) -> None:
        self.world = world
        self.objects: dict[str, dict[str, Any]] = {}
        self.versions = itertools.count(1)
        self.late: list[asyncio.Event] = []
        """Calls whose answer is delayed."""

    async def list_all(self, path: str, **_: Any) -> list[dict[str, Any]]:
        return [copy.deepcopy(each) for each in [self.objects.get(RUN)] if each is not None]

    async def __call__(self, method: str, path: str, body: Any = None, **_: Any) -> ApiResponse:
        fault = self.world.random.choices(("", "before", "after"), (8, 1, 1))[0] if self.world.faulty else ""
        if fault == "before":
            raise ApiUnavailable("no answer")
        answer = self.answer(method, path, copy.deepcopy(body))
        self.world.check()
        if self.world.faulty and self.world.random.random() < 0.2:
            self.late.append(asyncio.Event())
            await self.late[-1].wait()
        if fault == "after":
            raise ApiUnavailable("the answer is lost")
        return answer

    def answer(self, method: str, path: str, body: Any) -> ApiResponse:
        path = path.removesuffix("/status")
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return ApiResponse(status=409, document={})
            now = timestamp(self.world.wall_s)
            body["metadata"] |= {"uid": path.rpartition("/")[2], "creationTimestamp": now}
            return self.stored(path, body)
        found = self.objects.get(path)
        if found is None:
            return ApiResponse(status=404, document={})
        if method == "PATCH":
            if body["metadata"].get("resourceVersion") not in ("", found["metadata"]["resourceVersion"]):
                return ApiResponse(status=409, document={})
            status = {**found.get("status", {}), **body["status"]}
            found["status"] = {key: value for key, value in status.items() if value is not None}
            return self.stored(path, found)
        return ApiResponse(status=200, document=copy.deepcopy(found))

    def stored(self, path: str, document: dict[str, Any]) -> ApiResponse:
        document["metadata"]["resourceVersion"] = str(next(self.versions))
        self.objects[path] = document
        return ApiResponse(status=200, document=copy.deepcopy(document))


class ModelSidecar:
    """A process of one pod's sidecar: the real reporting code, and stand-ins for the other parts."""

    def __init__(self, world: ReportWorld, rank: int) -> None:
        self.world, self.rank, self.is_reporter = world, rank, rank == 0
        self.log = self.metrics = mock.MagicMock()
        self.incidents = Incidents(self.metrics)
        self.in_flight: list[Any] = []
        session, state = (
            SimpleNamespace(closed=False),
            SimpleNamespace(checkpoints=world.checkpoints, pinned={}, tip=0),
        )
        parts: Any = {
            "request_save": lambda _: session,
            "state": lambda: state,
            "in_flight": lambda: self.in_flight,
        }
        self.orders = SaveOrders(**parts)
        identity = {
            "pod_namespace": "n",
            "pod_name": NAMES[rank],
            "pod_uid": f"p-{rank}",
            "workload_uid": UID,
        }
        others = dict.fromkeys(
            {*(each.name for each in fleet.SidecarIdentity.DESCRIPTOR.fields), "node_name", "fleet"}, ""
        )
        self.settings = SimpleNamespace(**others | identity, fleet_token_file=None)
        self.directive = fleet.Directive(
            policy={"every_s": 1.0, "encoding": "q8", "differential": "intermittent"}
        )
        self.client = ReportClient(self)  # type: ignore[arg-type]
        self.client._post = world.posted  # type: ignore[method-assign]

    def apply_directive(self, directive: fleet.Directive) -> None:
        self.directive = directive

    def pod(self) -> fleet.PodState:
        ranks = [fleet.Rank(rank=self.rank, world_size=2, step=self.world.attempt)]
        return fleet.PodState(
            run=f"n/train-{UID}", phase=fleet.PHASE_TRAINING, ranks=ranks, attempt=self.world.attempt,
            store_ok=True, credentials_ok=True, directive=self.directive.id,
        )  # fmt: skip

    def run(self) -> fleet.RunState:
        return fleet.RunState(policy=self.directive.policy, attempts_opened=self.world.attempt)

    def report(self) -> None:
        """Report and handle the answer, as the client's thread does."""
        self.client._try(lambda: self.client._report(10.0))
        self.orders.poll()


class ReportWorld:
    """The complete model and its expected state."""

    def __init__(self, seed: int, defaults: Path) -> None:
        self.random = random.Random(seed)
        self.faulty, self.wall_s, self._defaults = True, 1.8e9, defaults
        self.api, self.late = VersionedApi(self), list[bytes]()
        """Calls that are still in the network."""
        self.attempt, self.lost, self.messages, self.every_s = 1, dict[int, int](), list[str](), 1
        """Lost steps by restored attempt; messages of incidents that must be reported."""
        self.checkpoints: dict[int, Any] = {}
        self.controllers: list[Controller] = []
        self.sidecars = [ModelSidecar(self, rank) for rank in range(2)]

    async def start(self) -> None:
        """Start another controller: it reads the runs, then receives all objects."""
        api: Any = self.api
        controller = controller_of(api, default_policy=self._defaults, wall=lambda: self.wall_s)
        await controller.load()
        controller.watches.on_job(job())
        for rank, name in enumerate(NAMES):
            document = pod()
            document["metadata"] |= {"name": name, "uid": f"p-{rank}"}
            controller.watches.on_pod(document)
        self.controllers.append(controller)
        self.deliver_watches(controller)

    def deliver_watches(self, controller: Controller) -> None:
        """Deliver the policy and the requests through the watches."""
        metadata = {"namespace": "n", "name": "default", "uid": "q-1", "generation": self.every_s}
        spec = {"interval": {"every": f"{self.every_s}s"}}
        controller.watches.on_policy({"metadata": metadata, "spec": spec})
        for path, each in self.api.objects.items():
            if REQUESTS in path:
                controller._requests.on_request(copy.deepcopy(each))
        controller.watches.synced = True

    def end(self, number: int) -> None:
        for task in self.controllers.pop(number).queue.tasks:
            task.cancel()

    def posted(self, body: bytes, token: str, deadline_s: float) -> tuple[int, float, bytes]:
        """Send a sidecar's call; raise `TimeoutError` when the call or its answer is lost or late."""
        fault = self.random.choices(("", "lost", "late", "answer"), (7, 1, 2, 2))[0] if self.faulty else ""
        if fault == "late":
            self.late.append(body)
        reply = self.deliver(body) if fault in ("", "answer") else b""
        if fault:
            raise TimeoutError(fault)
        return 200, 0.0, reply

    def deliver(self, body: bytes) -> bytes:
        """Deliver a call to one of the controllers, which answers."""
        controller = self.random.choice(self.controllers)
        report = reports.parse_report(fleet.ReportRequest.FromString(body))
        (entry,) = controller._run_store
        before, known = entry.run, entry.run.last_reports.get(report.identity.pod_uid)
        reply = controller.report(report)
        newest = known.report if known is not None and known.report.process == report.process else None
        stale = newest is not None and report.sequence <= newest.sequence
        if stale and entry.run is not before:
            raise ReportViolation("a late report changed the run")
        return reply.SerializeToString()

    async def move(self, name: str) -> None:
        side = self.random.choice(self.sidecars)
        self.wall_s += self.random.choice((0.1, 1.0, 10.0, 60.0))
        match name:
            case "report":
                side.report()
            case "tick":
                controller = self.random.choice(self.controllers)
                if self.random.random() < 0.5:
                    self.deliver_watches(controller)
                controller.tick()
            case "answer" if self.api.late:
                self.api.late.pop(self.random.randrange(len(self.api.late))).set()
            case "restore":  # reported by one rank, or by both
                self.attempt += 1
                self.lost[self.attempt] = self.random.randrange(5)
                for each in self.random.sample(self.sidecars, self.random.choice((1, 2))):
                    each.incidents.add(
                        fleet.INCIDENT_KIND_RESTORED, cause="store", message="", attempt=self.attempt,
                        lost_steps=self.lost[self.attempt], seconds=1.0,
                    )  # fmt: skip
            case "incident":
                self.messages.append(f"failure {len(self.messages)} of {side.rank}")
                side.incidents.add(
                    fleet.INCIDENT_KIND_SAVE_FAILED, cause=self.messages[-1], message=self.messages[-1]
                )
            case "snapshot":  # all ranks together; it replaces a save in flight
                orders = {order.id: order for each in self.sidecars for order in each.orders.open()}
                snapshot = SimpleNamespace(orders=[*orders.values()])
                for each in self.sidecars:
                    for older in each.in_flight:
                        each.orders.ended(older)
                    failure = Cause.SUPERSEDED, ""
                    each.in_flight[:] = [SimpleNamespace(decisions=snapshot, commit=None, failure=failure)]
            case "commit":
                self.commit()
            case "policy":
                self.every_s += 1
            case "request":
                document = {"metadata": {"namespace": "n", "name": f"r-{len(self.api.objects)}"}}
                spec = {"runRef": {"name": f"train-{UID}"}, "deadline": "24h"}
                self.api.answer("POST", RUNS.replace("checkpointruns", REQUESTS), {**document, "spec": spec})
            case "late" if self.late:
                body = self.random.choice(self.late)
                if self.random.random() < 0.5:  # otherwise it repeats
                    self.late.remove(body)
                self.deliver(body)
            case "restart_sidecar" if (
                not side.incidents.pending()
            ):  # an unreported event is lost with the process
                if self.random.random() < 0.5:
                    self.commit(ends=side)
                self.sidecars[side.rank] = ModelSidecar(self, side.rank)
            case "restart_controller":
                self.end(self.random.randrange(len(self.controllers)))
                await self.start()
            case "second_controller" if len(self.controllers) < 2:
                await self.start()
            case "one_controller" if len(self.controllers) > 1:
                self.end(0)
        await converged()

    def commit(self, *, ends: ModelSidecar | None = None) -> None:
        """The snapshot in flight becomes a checkpoint; a sidecar that `ends` at that moment gets no acknowledgement."""
        saves = [(each, save) for each in self.sidecars for save in each.in_flight]
        if len(saves) < len(self.sidecars):  # one of them restarted meanwhile
            return
        seq = len(self.checkpoints) + 1
        names = " ".join(each.id for each in saves[0][1].decisions.orders)
        self.checkpoints[seq] = SimpleNamespace(step=seq, seq=seq, metadata={ORDERS_KEY: names})
        for each, save in saves:
            each.in_flight.clear()
            save.commit = self.checkpoints[seq]
            if each is not ends:
                each.orders.ended(save)

    def check(self) -> None:
        status = self.api.objects.get(RUN, {}).get("status", {})
        counted = status.get("restores", 0), status.get("lostSteps", 0)
        if counted[0] > len(self.lost) or counted[1] > sum(self.lost.values()):
            raise ReportViolation(f"{counted} restores and steps are counted, expected {self.lost}")
        done = " ".join(each.metadata[ORDERS_KEY] for each in self.checkpoints.values()).split()
        if len(set(done)) < len(done):
            raise ReportViolation(f"saves were made twice: {done}")

    async def finish(self) -> None:
        """End the faults, keep one controller, and check that the state becomes correct within minutes."""
        self.faulty = False
        while len(self.controllers) > 1:
            self.end(0)
        mismatches = {"nothing": "happened yet"}
        for _ in range(40):
            if not (mismatches := self.mismatches()):
                return
            self.wall_s += 61.0
            for answer in self.api.late:
                answer.set()
            self.deliver_watches(self.controllers[0])
            for name in ("tick", "report", "report", "report", "snapshot", "commit"):
                await self.move(name)
            self.check()
        raise ReportViolation(f"{mismatches}")

    def mismatches(self) -> dict[str, Any]:
        """Return (actual, expected) of each value that is not yet correct."""
        status, objects = self.api.objects[RUN].get("status", {}), self.api.objects
        recorded = [
            each["message"].partition(": ")[2]
            for each in objects.values()
            if each.get("reason") == "SaveFailed"
        ]
        phases = {each.get("status", {}).get("phase") for path, each in objects.items() if REQUESTS in path}
        found = {
            "restores": (status.get("restores"), len(self.lost)),
            "lost steps": (status.get("lostSteps"), sum(self.lost.values())),
            "Events": (sorted(recorded), sorted(2 * self.messages)),
            "kept incidents": ([len(each.incidents.pending()) for each in self.sidecars], [0, 0]),
            "intervals": ([each.directive.policy.every_s for each in self.sidecars], 2 * [self.every_s]),
            "requests": (phases - {"Completed"}, set[str]()),
        }
        return {name: both for name, both in found.items() if both[0] != both[1]}


async def converged() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def run_schedule(seed: int, steps: int = 250) -> None:

    async def scenario() -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(sample.DEFAULTS, file)
            file.flush()
            world = ReportWorld(seed, Path(file.name))
            await world.start()
            for _ in range(steps):
                await world.move(world.random.choices([*MOVES], [*MOVES.values()])[0])
                world.check()
            await world.finish()
            for number in range(len(world.controllers)):
                world.end(number)

    # A run with more incidents than its limit lacks some Events.
    with capture_logs(), mock.patch.object(writer, "RUN_EVENT_BURST", 1000):
        asyncio.run(scenario())
