"""Thousands of simulated sidecars in one process and event loop; each report has its own TLS connection and address.

The sidecars report a training without failures: restoring, training, commits at the same moments in all pods of a run,
increasing steps, and an ordered save that is durable at once. The real schedule of reports applies
(`deltashard_sidecar.fleet.report_schedule`). Only the data path is missing. All addresses have one port for nudges.

The process executes commands (JSON lines on standard input) and answers each with a line:

    {"do": "add", "members": [...], "within_s": 5}   start sidecars, spread over some seconds
    {"do": "reopen", "workloads": [...]}             the groups reopen their runs
    {"do": "remove", "uids": [...]}                  end sidecars without a report, like a lost node
    {"do": "mark"}                                   reset `accepted` until a sidecar's next accepted report
    {"do": "report"}                                 return the counters (`SwarmStats`)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as trainer_wire
from deltashard_sidecar.fleet.report_schedule import ReportSchedule

NAME = "deltashard-fleet.deltashard-system.svc"
"""The name in the controller's certificate."""
DEADLINE_S = 10.0
CONNECTIONS = 1024
"""Concurrent connections of all sidecars, which share one processor. The controller's own limit is lower."""
RESTORING_S = 1.0
SAVING_S = 2.0
STEPS_PER_S = 10.0
STORED_BYTES = 8 << 30
NUDGE_REPLY = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmMember:
    """The sidecar of one pod."""

    namespace: str
    pod: str
    uid: str
    node: str
    address: str
    """The pod's address on loopback."""
    workload: str
    workload_uid: str
    index: str
    ranks: int
    """The number of pods of the run."""
    token: str
    restored: bool = False
    """Whether the pod replaces a lost one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSchedule:
    """The commit times of a run."""

    every_s: float
    """Seconds between commits."""

    def committed(self, member: SwarmMember, now_s: float) -> tuple[int, float]:
        """Return the run's number of commits and the time of the newest, the same in all of its pods."""
        offset = int.from_bytes(hashlib.sha256(member.workload_uid.encode()).digest()[:4]) / 2**32
        number = int(now_s / self.every_s + offset)
        return number, (number - offset) * self.every_s


@dataclass(slots=True)
class SwarmStats:
    """Counters of all sidecars."""

    alive: int = 0
    accepted: int = 0
    """Running sidecars whose report was accepted since the mark."""
    reporters: int = 0
    """The sidecars among `accepted` that report for their run."""
    reports: int = 0
    nudges: int = 0
    directives: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    """By status, or `unreachable`."""
    report_s: list[float] = field(default_factory=list)
    """Seconds of each report since the last answer."""
    received_at_s: dict[str, float] = field(default_factory=dict)
    """When an order was first received, in Unix seconds, by its id."""


class SimulatedSidecar:
    """A simulated sidecar; `run` works until it is cancelled."""

    def __init__(self, member: SwarmMember, state: SwarmState) -> None:
        self.member = member
        self._state = state
        self._started_s = time.time()
        self._process = os.urandom(8).hex()
        self._sequence = 0
        self._directive = 0
        self._acknowledged_id = 0
        self._open_orders: dict[str, None] = {}
        """Ids of open orders; an order is done as soon as it is received."""
        self._schedule = ReportSchedule()
        self._wake = asyncio.Event()
        self._nudged = False
        """Whether a nudge arrived since the last check, also during a report."""
        self._has_unreported = False
        """Whether a change is missing from all reports."""
        self.is_reporter = member.index == "0"
        self.accepted = False

    def nudge(self) -> None:
        self._state.stats.nudges += 1
        self._nudged = True
        self._wake.set()

    async def run(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        loop = asyncio.get_running_loop()
        loop.call_later(RESTORING_S, self.changed)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._schedule.due_s - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            if self._nudged:
                self._nudged = False
                self._schedule = self._schedule.nudged(time.monotonic())
            if self._has_unreported:
                self._schedule = self._schedule.changed(time.monotonic())
            if time.monotonic() >= self._schedule.due_s:
                await self._report()

    def changed(self) -> None:
        self._has_unreported = True
        self._wake.set()

    async def _report(self) -> None:
        stats = self._state.stats
        self._sequence += 1
        before, self._has_unreported = self._has_unreported, False
        try:
            async with self._state.connections, asyncio.timeout(DEADLINE_S):
                begun_s = time.monotonic()
                status, retry_after_s, body = await self._post(self._request().SerializeToString())
        except (OSError, ValueError, IndexError):  # the last two: the connection ended early
            status, retry_after_s, body = 0, 0.0, b""
        now_s = time.monotonic()
        if status != 200:
            cause = str(status or "unreachable")
            stats.refusals[cause] = stats.refusals.get(cause, 0) + 1
            self._has_unreported |= before
            self._schedule = self._schedule.failed(status, now_s, retry_after_s=retry_after_s)
            return
        stats.report_s.append(now_s - begun_s)
        stats.reports += 1
        self.accepted = True
        reply = wire.ReportReply.FromString(body)
        self._schedule = self._schedule.accepted(reply.next_s, now_s)
        self.is_reporter = reply.report_run
        self._acknowledged_id = max(self._acknowledged_id, reply.acknowledged_incident)
        if reply.HasField("directive"):
            self._directive = reply.directive.id
            stats.directives += 1
        earlier, self._open_orders = self._open_orders, dict.fromkeys(each.id for each in reply.saves)
        for order in self._open_orders:
            stats.received_at_s.setdefault(order, time.time())
        if self._open_orders.keys() - earlier.keys():
            self.changed()

    async def _post(self, body: bytes) -> tuple[int, float, bytes]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            self._state.port,
            ssl=self._state.context,
            server_hostname=NAME,
            local_addr=(self.member.address, 0),
        )
        try:
            head = (
                f"POST /v1/report HTTP/1.1\r\nHost: {NAME}\r\nAuthorization: Bearer {self.member.token}\r\n"
                f"Content-Type: application/x-protobuf\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            lines, _, content = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        first, *rest = lines.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in rest)
        return int(first.split(" ", 2)[1]), float(headers.get("retry-after", 0)), content

    def _request(self) -> wire.ReportRequest:
        member, now_s = self.member, time.time()
        run = f"{member.namespace}/{member.workload}-{member.workload_uid}"
        commits, committed_s = self._state.commit_schedule.committed(member, now_s)
        step = int(commits * self._state.commit_schedule.every_s * STEPS_PER_S)
        reopened = self._state.reopened[member.workload_uid]
        restoring = now_s < self._started_s + RESTORING_S
        request = wire.ReportRequest(
            protocol=1,
            process=self._process,
            sequence=self._sequence,
            now_s=now_s,
            identity=wire.SidecarIdentity(
                version="0.1.0",
                namespace=member.namespace,
                pod=member.pod,
                pod_uid=member.uid,
                node=member.node,
                workload_kind="Job",
                workload_name=member.workload,
                workload_uid=member.workload_uid,
                run=run,
                index=member.index,
                policy="default",
                url="s3://checkpoints/load",
                started_at_s=self._started_s,
            ),
            pod=wire.PodState(
                run=run,
                phase=wire.PHASE_RESTORING if restoring else wire.PHASE_TRAINING,
                ranks=[wire.Rank(rank=int(member.index), world_size=member.ranks, step=step)],
                attempt=1 + 100 * reopened,
                store_ok=True,
                credentials_ok=True,
                directive=self._directive,
            ),
            save_results=[
                wire.SaveResult(id=each, outcome=wire.SaveResult.OUTCOME_COMMITTED, step=step, seq=commits)
                for each in self._open_orders
            ],
        )
        if self.is_reporter:
            commit = trainer_wire.Commit(
                seq=commits, attempt=1, step=step, durable_s=SAVING_S, stored_bytes=STORED_BYTES // 100
            )
            request.run.CopyFrom(
                wire.RunState(
                    newest=commit,
                    newest_age_s=now_s - committed_s,
                    checkpoint_count=3,
                    stored_bytes=STORED_BYTES,
                    attempts_opened=1 + reopened,
                    policy=trainer_wire.Policy(
                        every_s=self._state.commit_schedule.every_s,
                        encoding="q8",
                        differential="intermittent",
                    ),
                )
            )
        if member.restored and not restoring and not self._acknowledged_id:
            request.incidents.add(
                id=1,
                kind=wire.INCIDENT_KIND_RESTORED,
                at_s=self._started_s + RESTORING_S,
                cause="store",
                message=f"restored step {step} from the store",
                step=step,
                lost_steps=7,
                seconds=RESTORING_S,
                attempt=1 + 100 * reopened,
            )
        return request


@dataclass(slots=True, kw_only=True)
class SwarmState:
    """State that all sidecars of a process share."""

    port: int
    context: ssl.SSLContext
    commit_schedule: CommitSchedule
    stats: SwarmStats = field(default_factory=SwarmStats)
    connections: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTIONS))
    reopened: Counter[str] = field(default_factory=Counter)
    """How often the group of each workload, by UID, has reopened its run."""
    alive: dict[str, tuple[SimulatedSidecar, asyncio.Task[None]]] = field(default_factory=dict)
    by_address: dict[str, SimulatedSidecar] = field(default_factory=dict)

    async def handle_nudge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            sidecar = self.by_address.get(writer.get_extra_info("sockname")[0])
            if sidecar is not None:
                sidecar.nudge()
            writer.write(NUDGE_REPLY)
        writer.close()

    def execute(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "add":
                for fields in command["members"]:
                    member = SwarmMember(**fields)
                    sidecar = self.by_address[member.address] = SimulatedSidecar(member, self)
                    delay_s = random.uniform(0, command["within_s"])
                    self.alive[member.uid] = sidecar, asyncio.create_task(sidecar.run(delay_s))
            case "reopen":
                self.reopened.update(command["workloads"])
                for sidecar, _ in self.alive.values():
                    if sidecar.member.workload_uid in command["workloads"]:
                        sidecar.changed()
            case "remove":
                for uid in command["uids"]:
                    self.alive.pop(uid)[1].cancel()
            case "mark":
                for sidecar, _ in self.alive.values():
                    sidecar.accepted = False
        for uid, (_, task) in self.alive.items():
            if task.done():
                raise SystemExit(f"the sidecar of {uid} failed: {task.exception()!r}")
        accepted = [each for each, _ in self.alive.values() if each.accepted]
        self.stats.alive, self.stats.accepted = len(self.alive), len(accepted)
        self.stats.reporters = sum(each.is_reporter for each in accepted)


class Swarm:
    """The parent's handle of a process of sidecars."""

    def __init__(
        self, folder: Path, *, name: str, port: int, nudge_port: int, trusted: str, every_s: float
    ) -> None:
        (folder / f"{name}.pem").write_text(trusted)
        with (folder / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "tests.load.simulation.swarm", f"--port={port}",
                    f"--nudge-port={nudge_port}",
                    f"--trusted={folder}/{name}.pem", f"--every-s={every_s}",
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=Path(__file__).parents[3],
            )  # fmt: skip
        self.pid = self._process.pid
        self._log = folder / f"{name}.log"

    def add(self, members: Iterable[SwarmMember], *, within_s: float) -> None:
        self._send(do="add", members=[asdict(each) for each in members], within_s=within_s)

    def reopen(self, workloads: Iterable[str]) -> None:
        """Make the groups of these workloads, by UID, reopen their runs: each has lost a member."""
        self._send(do="reopen", workloads=list(workloads))

    def remove(self, uids: Iterable[str]) -> None:
        self._send(do="remove", uids=list(uids))

    def mark(self) -> None:
        """Reset which sidecars count as accepted until their next accepted report."""
        self._send(do="mark")

    def report(self) -> dict[str, Any]:
        return self._send(do="report")

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._process.stdout.close()

    def _send(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the simulated sidecars' process ended: {self._log.read_text()[-4000:]}"
        return json.loads(line)


async def _serve(state: SwarmState, nudge_port: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with await asyncio.start_server(state.handle_nudge, "0.0.0.0", nudge_port, backlog=4096):
        while line := await reader.readline():
            state.execute(json.loads(line))
            sys.stdout.write(json.dumps(asdict(state.stats)) + "\n")
            sys.stdout.flush()
            state.stats.report_s.clear()
    tasks = [task for _, task in state.alive.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--nudge-port", required=True, type=int)
    parser.add_argument("--trusted", required=True, type=Path)
    parser.add_argument("--every-s", required=True, type=float)
    options = parser.parse_args()
    context = ssl.create_default_context(cafile=options.trusted)
    state = SwarmState(
        port=options.port, context=context, commit_schedule=CommitSchedule(every_s=options.every_s)
    )
    asyncio.run(_serve(state, options.nudge_port))


if __name__ == "__main__":
    main()
