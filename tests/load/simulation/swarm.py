"""Sidecars by the thousand: one process, one event loop, a TLS connection and a stream each, as pods have them.

Each says what a sidecar says of a training that goes well: restoring, training, a save at the same moments in all pods
of a run, steps that rise. When it speaks is decided by the sidecar's own rules (`deltashard_sidecar.fleet.heartbeat`), and
so is when it comes back; only the data path is missing.

The process obeys lines of JSON on its standard input and answers each with a line:

    {"do": "add", "members": [...], "within_s": 5}   begin, spread over some seconds
    {"do": "remove", "uids": [...]}                  end without a word, as with the pod's node
    {"do": "report"}                                 what became of them so far
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import fleet_pb2_grpc as service
from deltashard_proto.v1 import trainer_pb2 as trainer_wire
from deltashard_sidecar.fleet import fleet_stream, heartbeat

NAME = "deltashard-fleet.deltashard-system.svc"
"""Of the controller's certificate."""
WELCOME_S = 30.0
RESTORING_S = 1.0
SAVING_S = 2.0
STEPS_PER_S = 10.0
STORED_BYTES = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One pod's sidecar."""

    namespace: str
    pod: str
    uid: str
    node: str
    workload: str
    workload_uid: str
    index: str
    ranks: int
    """Pods of the run."""
    token: str
    restored: bool = False
    """It takes the place of a pod that was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a run trains."""

    every_s: float
    """Between commits."""

    def committed(self, member: Member, now_s: float) -> int:
        """How many commits its run has by now: the same in all of its pods."""
        offset = int.from_bytes(hashlib.sha256(member.workload_uid.encode()).digest()[:4]) / 2**32
        return int(now_s / self.every_s + offset)

    def next_s(self, member: Member, now_s: float) -> float:
        """When its run's next commit is."""
        offset = int.from_bytes(hashlib.sha256(member.workload_uid.encode()).digest()[:4]) / 2**32
        return (self.committed(member, now_s) + 1 - offset) * self.every_s


@dataclass(slots=True)
class Told:
    """What became of all of them."""

    streams: int = 0
    welcomed: int = 0
    heartbeats: int = 0
    acks: int = 0
    directives: int = 0
    saves_requested: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    welcome_s: list[float] = field(default_factory=list)
    """How long each stream took to be taken in, of those since the last report."""


class Sidecar:
    """One of them; `live` until cancelled."""

    def __init__(
        self, member: Member, target: str, trusted: bytes, pace: Pace, told: Told, reopened: Counter[str]
    ) -> None:
        """`reopened`: how often the group of each workload, by UID, has opened its run once more."""
        self._member = member
        self._reopened = reopened
        self._target = target
        self._credentials = grpc.ssl_channel_credentials(trusted)
        self._pace = pace
        self._told = told
        self._begun_s = time.time()
        self._process = os.urandom(8).hex()
        self._directive = 0
        self._acknowledged = 0

    async def live(self, delay_s: float) -> None:
        """Connect, stay connected, come back."""
        await asyncio.sleep(delay_s)
        failures = 0
        while True:
            welcomed, cause = await self._stream()
            if cause:
                self._told.refusals[cause] = self._told.refusals.get(cause, 0) + 1
            failures = heartbeat.failures_after(
                failures, welcomed=welcomed, lasting=cause in heartbeat.LASTING
            )
            await asyncio.sleep(heartbeat.BACKOFF.delay_s(failures))

    async def _stream(self) -> tuple[bool, str]:
        """One stream from its beginning to its end: (whether it was taken in, why it ended without that)."""
        channel = grpc.aio.secure_channel(
            self._target,
            self._credentials,
            options=[
                ("grpc.use_local_subchannel_pool", 1),  # pods do not share connections
                ("grpc.ssl_target_name_override", NAME),
                ("grpc.enable_http_proxy", 0),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        welcomed, writer = False, None
        try:
            stub = service.FleetStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Report(metadata=(("authorization", f"Bearer {self._member.token}"),))
            begun_s = time.monotonic()
            async with asyncio.timeout(WELCOME_S):
                await call.write(wire.ReportRequest(hello=self._hello()))
                first = await call.read()
            if first is grpc.aio.EOF:
                raise await _ended(call)
            self._told.welcome_s.append(time.monotonic() - begun_s)
            self._told.welcomed += 1
            self._told.streams += 1
            welcomed = True
            writer = asyncio.create_task(self._write(call, first.welcome.heartbeat_s))
            while (reply := await call.read()) is not grpc.aio.EOF:
                self._take(reply)
            raise await _ended(call)
        except TimeoutError:
            return welcomed, "no_welcome"
        except grpc.RpcError as error:
            return welcomed, "" if welcomed else fleet_stream.refusal(error.code(), error.details() or "")
        except asyncio.InvalidStateError:  # written to after its end
            return welcomed, "" if welcomed else "unreachable"
        finally:
            if welcomed:
                self._told.streams -= 1
            if writer is not None:
                writer.cancel()
            await channel.close()

    async def _write(self, call: Any, heartbeat_s: float) -> None:
        pace = heartbeat.HeartbeatPace().asked(heartbeat_s)
        while True:
            now_s = time.time()
            beat = self._beat(now_s)
            if pace.due(beat, now_s):
                try:
                    await call.write(wire.ReportRequest(heartbeat=beat))
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the reading side says why
                self._told.heartbeats += 1
                pace = pace.after(beat, now_s)
            wake_s = self._changes_s(now_s, pace)
            if pace.sent_s is not None and heartbeat.news(beat) != pace.sent:  # held back, to be no pest
                wake_s = min(wake_s, pace.sent_s + heartbeat.SHORTEST_S)
            await asyncio.sleep(max(0.05, wake_s - time.time()))

    def _changes_s(self, now_s: float, pace: heartbeat.HeartbeatPace) -> float:
        """When there is something to say next."""
        commit_s = self._pace.next_s(self._member, now_s)
        when = [(pace.sent_s or now_s) + pace.heartbeat_s, commit_s - SAVING_S, commit_s]
        if now_s < self._begun_s + RESTORING_S:
            when.append(self._begun_s + RESTORING_S)
        return min(each for each in when if each > now_s)

    def _take(self, reply: wire.ReportReply) -> None:
        kind = reply.WhichOneof("kind")
        if kind == "ack":
            self._acknowledged = reply.ack.incident
            self._told.acks += 1
        elif kind == "directive":
            self._directive = reply.directive.generation
            self._told.directives += 1
        elif kind == "save_now":
            self._told.saves_requested += 1

    def _hello(self) -> wire.Hello:
        member = self._member
        return wire.Hello(
            protocol_min=1,
            protocol_max=1,
            version="0.1.0",
            namespace=member.namespace,
            pod=member.pod,
            pod_uid=member.uid,
            node=member.node,
            workload_kind="Job",
            workload_name=member.workload,
            workload_uid=member.workload_uid,
            run=self._run,
            index=member.index,
            policy="default",
            url="s3://checkpoints/load",
            process=self._process,
            started_at_s=self._begun_s,
        )

    @property
    def _run(self) -> str:
        member = self._member
        return f"{member.namespace}/{member.workload}-{member.workload_uid}"

    def _beat(self, now_s: float) -> wire.Heartbeat:
        member, pace = self._member, self._pace
        commits = pace.committed(member, now_s)
        since_s = max(0.0, now_s - self._begun_s)
        step = int(commits * pace.every_s * STEPS_PER_S)
        phase = wire.PHASE_TRAINING
        if since_s < RESTORING_S:
            phase = wire.PHASE_RESTORING
        elif pace.next_s(member, now_s) - now_s <= SAVING_S:
            phase = wire.PHASE_SAVING
        beat = wire.Heartbeat(
            run=self._run,
            phase=phase,
            ranks=[wire.Rank(rank=int(member.index), world_size=member.ranks, step=step)],
            attempt=1 + 100 * self._reopened[member.workload_uid],
            openings=1 + self._reopened[member.workload_uid],
            last_commit=trainer_wire.Commit(
                seq=commits, attempt=1, step=step, durable_s=SAVING_S, stored_bytes=STORED_BYTES // 100
            ),
            last_commit_at_s=pace.next_s(member, now_s) - pace.every_s,
            policy=trainer_wire.Policy(every_s=pace.every_s, encoding="q8", differential="intermittent"),
            stored_bytes=STORED_BYTES,
            checkpoints=3,
            restores=int(member.restored and since_s >= RESTORING_S),
            store_ok=True,
            credentials_ok=True,
            directive=self._directive,
        )
        if member.restored and since_s >= RESTORING_S and not self._acknowledged:
            beat.incidents.add(
                id=1,
                kind=wire.INCIDENT_KIND_RESTORED,
                at_s=self._begun_s + RESTORING_S,
                cause="store",
                message=f"restored step {step} from the store",
                step=step,
                lost_steps=7,
                seconds=RESTORING_S,
            )
        return beat


async def _ended(call: Any) -> grpc.RpcError:
    """How a call that gives no more ended, as an error."""
    return grpc.aio.AioRpcError(
        await call.code(),
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details=await call.details() or "",
    )


class Swarm:
    """A process of sidecars, from the outside."""

    def __init__(self, folder: Path, *, name: str, port: int, trusted: str, every_s: float) -> None:
        (folder / f"{name}.pem").write_text(trusted)
        with (folder / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "tests.load.simulation.swarm", f"--target=localhost:{port}",
                    f"--trusted={folder}/{name}.pem", f"--every-s={every_s}",
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=Path(__file__).parents[3],
            )  # fmt: skip
        self.pid = self._process.pid

    def add(self, members: Iterable[Member], *, within_s: float) -> None:
        """Begin these, spread over some seconds."""
        self._ask(do="add", members=[asdict(each) for each in members], within_s=within_s)

    def reopen(self, workloads: Iterable[str]) -> None:
        """The groups of these workloads, by UID, open their runs once more: a member of each was lost."""
        self._ask(do="reopen", workloads=list(workloads))

    def remove(self, uids: Iterable[str]) -> None:
        """End these pods' without a word."""
        self._ask(do="remove", uids=list(uids))

    def report(self) -> dict[str, Any]:
        """`Told`, as a document."""
        return self._ask(do="report")

    def stop(self) -> None:
        """End all of them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the simulated sidecars' process ended: see its log"
        return json.loads(line)


async def _obey(target: str, trusted: bytes, pace: Pace) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    told = Told()
    reopened: Counter[str] = Counter()
    living: dict[str, asyncio.Task[None]] = {}
    while line := await reader.readline():
        command = json.loads(line)
        if command["do"] == "add":
            for fields in command["members"]:
                member = Member(**fields)
                sidecar = Sidecar(member, target, trusted, pace, told, reopened)
                delay_s = random.uniform(0, command["within_s"])
                living[member.uid] = asyncio.create_task(sidecar.live(delay_s))
        elif command["do"] == "reopen":
            reopened.update(command["workloads"])
        elif command["do"] == "remove":
            for uid in command["uids"]:
                living.pop(uid).cancel()
        for uid, task in living.items():
            if task.done():
                raise SystemExit(f"the sidecar of {uid} failed: {task.exception()!r}")
        sys.stdout.write(json.dumps(asdict(told)) + "\n")
        sys.stdout.flush()
        told.welcome_s.clear()
    for task in living.values():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*living.values(), return_exceptions=True)


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--trusted", required=True, type=Path)
    parser.add_argument("--every-s", required=True, type=float)
    options = parser.parse_args()
    asyncio.run(_obey(options.target, options.trusted.read_bytes(), Pace(every_s=options.every_s)))


if __name__ == "__main__":
    main()
