"""A Job of several pods that train one run under torchrun, and what its trainers said of it.

A *round* is one coming together of the ranks: one attempt in the log. It began when all its ranks had restored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.process import ClusterError
from tests.cluster.scenario.bench import Bench
from tests.cluster.scenario.job import TrainingJob
from tests.cluster.scenario.witness import Event
from tests.support.machine import limit_s

PORT = 29400
RUN = (
    "exec {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={ranks} --max-restarts=1000 "
    "--rdzv-backend=c10d --rdzv-endpoint={name}-0.{name}:{port} --rdzv-id={name} "
    "--rdzv-conf=is_host=$([ $JOB_COMPLETION_INDEX = 0 ] && echo true || echo false),join_timeout=600,read_timeout=20 "
    "/app/group.py"
)
"""What the training container runs: torchrun, which meets the others at the pod with number 0."""


def container(name: str, env: list[Object], *, nodes: str, ranks: int) -> Object:
    """The fields of a training container that make it one of a group."""
    script = RUN.format(python="python3.11", nodes=nodes, ranks=ranks, name=name, port=PORT)
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    return {
        "command": ["/bin/sh", "-c", script],
        "args": [],
        "env": [*env, *({"name": key, "value": value} for key, value in more.items())],
    }


def service(name: str, selector: Mapping[str, str]) -> Object:
    """A headless Service, by which pods find one another before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": dict(selector)},
    }


@dataclass(frozen=True, slots=True)
class Round:
    """All ranks' begins of one attempt."""

    attempt: int
    ranks: Mapping[int, Event]

    @property
    def step(self) -> int:
        """Where it begins."""
        return int(self.ranks[0]["step"])

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return int(self.ranks[0]["world_size"])

    @property
    def pods(self) -> list[str]:
        """By rank."""
        return [self.ranks[rank]["pod"] for rank in sorted(self.ranks)]

    def nodes(self) -> list[str]:
        """Nodes, by rank."""
        return [self.ranks[rank]["node"] for rank in sorted(self.ranks)]


class TrainingGroup:
    """One Job of several pods, in its namespace."""

    def __init__(
        self, bench: Bench, name: str, *, pods: int, nodes: str = "", ranks: int = 1, **more: Any
    ) -> None:
        self.bench, self.name = bench, name
        spec = {"completionMode": "Indexed", "completions": pods, "parallelism": pods, "backoffLimit": 1000}
        bench.cluster.api.create(
            f"/api/v1/namespaces/{bench.namespace}/services",
            service(name, {"batch.kubernetes.io/job-name": name}),
        )
        plain = bench.manifest(name)["spec"]["template"]["spec"]["containers"][0]
        self.job: TrainingJob = bench.job(
            name,
            container=container(name, plain["env"], nodes=nodes or str(pods), ranks=ranks),
            pod={"subdomain": name, "terminationGracePeriodSeconds": 60},
            spec=spec,
            **more,
        )

    # What its ranks said.

    def events(self, kind: str) -> list[Event]:
        """Everything of a kind."""
        return [each for each in self.bench.witness.of(self.job.key) if each["kind"] == kind]

    def rounds(self) -> list[Round]:
        """Those that began, in order."""
        found: dict[int, dict[int, Event]] = {}
        for each in self.events("began"):
            found.setdefault(each["attempt"], {})[each["rank"]] = each
        return [
            Round(attempt, ranks)
            for attempt, ranks in sorted(found.items())
            if len(ranks) == next(iter(ranks.values()))["world_size"]
        ]

    def wait_round(self, *, after: int = 0, world_size: int = 0, timeout_s: float = 240.0) -> Round:
        """The first round of an attempt beyond `after` (with so many ranks), waiting for it if need be."""

        def begun() -> Round | None:
            return next(
                (r for r in self.rounds() if r.attempt > after and world_size in (0, r.world_size)), None
            )

        self.bench.witness.wait(
            self.job.key, lambda _: begun() is not None, timeout_s=timeout_s,
            what=f"a round of {self.name} after attempt {after}",
        )  # fmt: skip
        found = begun()
        assert found is not None
        self.bench.note(
            f"{self.name}: attempt {found.attempt} of {found.world_size} ranks from step {found.step} on {found.nodes()}"
        )
        return found

    def wait_step(self, step: int, *, attempt: int, timeout_s: float = 180.0) -> None:
        """Until a rank has done a step under an attempt."""
        self.bench.witness.wait(
            self.job.key,
            lambda e: e["kind"] == "step" and e["attempt"] == attempt and e["step"] >= step,
            timeout_s=timeout_s,
            what=f"step {step} of {self.name} under attempt {attempt}",
        )

    def last_step(self, attempt: int) -> int:
        """The newest step that any rank did under an attempt."""
        return max((e["step"] for e in self.events("step") if e["attempt"] == attempt), default=0)

    # What is asked of them.

    def assert_restored(self, back: Round, *, at_least: int) -> None:
        """Every rank began at one step, with exactly the rows and dense parameters that the ranks had at that step."""
        assert {each["step"] for each in back.ranks.values()} == {back.step}, back
        assert back.step >= at_least, f"from step {back.step}, not {at_least}"
        assert all(each["exact"] is not False for each in back.ranks.values()), back
        told = [e for e in self.events("step") if e["step"] == back.step and e["attempt"] < back.attempt]
        newest = max(each["attempt"] for each in told)
        before = {each["rank"]: each for each in told if each["attempt"] == newest}
        assert len(before) == next(iter(before.values()))["world_size"]
        assert total(back.ranks) == total(before), f"rows of step {back.step}"
        assert {e["dense"] for e in back.ranks.values()} == {e["dense"] for e in before.values()}

    def assert_every_sample_once(self) -> None:
        """Of the first epoch, in what the run is made of: no sample twice, and none left out once it is over."""
        rounds = self.rounds()
        ends = [each.step for each in rounds[1:]] + [self.last_step(rounds[-1].attempt)]
        used: Counter[int] = Counter()
        over = False
        for each, end in zip(rounds, ends, strict=True):
            for event in self.events("step"):
                if event["attempt"] == each.attempt and each.step < event["step"] <= end:
                    over |= event["epoch"] > 0
                    if event["epoch"] == 0:
                        used.update(event["samples"])
        assert used
        assert max(used.values()) == 1, [sample for sample, times in used.items() if times > 1][:20]
        widest = max(each.world_size for each in rounds)
        if over:
            # The last samples, fewer than one for each rank or batch, are left out at each end of an epoch.
            assert len(used) > 6000 - 8 * widest, len(used)
        self.bench.note(
            f"{self.name}: {len(used)} samples, each once; the epoch is {'' if over else 'not '}over"
        )


def total(ranks: Mapping[int, Event]) -> dict[str, int]:
    """The ranks' sums together, which mean the whole tables."""
    found: Counter[str] = Counter()
    for each in ranks.values():
        found.update(each["sums"])
    return {key: value % (1 << 64) for key, value in found.items()}


def status_of(group: TrainingGroup) -> Object:
    """Status of its CheckpointRun."""
    return dict((group.job.checkpoint_run() or {}).get("status") or {})


def wait_status(group: TrainingGroup, what: str, matches: Any, *, timeout_s: float = 120.0) -> Object:
    """The CheckpointRun's status once it is so."""
    from tests.cluster.kubernetes.process import wait_until

    wait_until(
        lambda: matches(status_of(group)), timeout_s=timeout_s, every_s=0.3,
        what=lambda: f"{what}: {json.dumps(status_of(group))}",
    )  # fmt: skip
    return status_of(group)


__all__ = ["ClusterError", "TrainingGroup", "limit_s"]
