"""Workloads of several pods that train one run under torchrun, and the events of their trainers.

A *round* is one rendezvous of the ranks: one attempt in the log. It begins when all its ranks have restored.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.image import PYTHON
from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.event_server import Event
from tests.cluster.scenario.job import JOBSET, TrainingJob

PORT = 29400
SAMPLES, BATCH = 6000, 8
TABLE_ROWS = {"user": 3000, "item": 1700}
"""As in trainers/group.py."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
RUN = (
    "[ $JOB_COMPLETION_INDEX = 0 ] && first=localhost || first={first}; "
    "exec {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 --max-restarts=1000 "
    "--rdzv-backend=c10d --rdzv-endpoint=$first:{port} --rdzv-id=group --local-addr=$POD_IP "
    "--rdzv-conf=join_timeout=600,read_timeout=20 /app/group.py"
)
"""The training container's command: torchrun, whose rendezvous is at pod 0."""
GRACE_S = 60


def ranked(template: Object, *, first: str, nodes: str, env: Mapping[str, str] | None = None) -> Object:
    container = template["containers"][0]
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **ENVIRONMENT, **(env or {})}
    container |= {
        "command": ["/bin/sh", "-c", RUN.format(python=PYTHON, nodes=nodes, first=first, port=PORT)],
        "args": [],
        "env": [
            *container["env"],
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": key, "value": value} for key, value in more.items()),
        ],
    }
    return template | {"terminationGracePeriodSeconds": GRACE_S}


@dataclass(frozen=True, slots=True)
class Round:
    """The start events of all ranks in one attempt."""

    attempt: int
    ranks: Mapping[int, Event]

    @property
    def step(self) -> int:
        return int(self.ranks[0]["step"])

    @property
    def world_size(self) -> int:
        return int(self.ranks[0]["world_size"])

    @property
    def pods(self) -> list[str]:
        return [self.ranks[rank]["pod"] for rank in sorted(self.ranks)]

    @property
    def nodes(self) -> list[str]:
        return [self.ranks[rank]["node"] for rank in sorted(self.ranks)]


class TrainingGroup:
    """A workload of several pods, in its namespace."""

    def __init__(self, bench: ScenarioBench, job: TrainingJob) -> None:
        self.bench, self.job = bench, job
        self.name = job.name

    def events(self, kind: str) -> list[Event]:
        return self.bench.event_server.of(self.job.key, kind)

    def rounds(self) -> list[Round]:
        found: dict[int, dict[int, Event]] = {}
        for each in self.events("began"):
            found.setdefault(each["attempt"], {})[each["rank"]] = each
        return [
            Round(attempt, ranks)
            for attempt, ranks in sorted(found.items())
            if len(ranks) == next(iter(ranks.values()))["world_size"]
        ]

    def wait_round(self, *, after: int = 0, world_size: int = 0, timeout_s: float = 300.0) -> Round:

        def begun() -> Round | None:
            return next(
                (r for r in self.rounds() if r.attempt > after and world_size in (0, r.world_size)), None
            )

        wait_until(
            begun, timeout_s=timeout_s, every_s=0.2,
            what=lambda: f"a round of {self.name} after attempt {after}: {self.rounds()}",
        )  # fmt: skip
        found = begun()
        assert found is not None
        self.bench.note(
            f"{self.name}: attempt {found.attempt} of {found.world_size} ranks from step {found.step}, {found.nodes}"
        )
        return found

    def wait_step(self, step: int, *, attempt: int, timeout_s: float = 180.0) -> None:
        self.bench.event_server.wait(
            self.job.key,
            lambda e: e["kind"] == "step" and e["attempt"] == attempt and e["step"] >= step,
            timeout_s=timeout_s,
            what=f"step {step} of {self.name} under attempt {attempt}",
        )

    def wait_rank_step(self, rank: int, step: int, *, attempt: int) -> None:
        self.bench.event_server.wait(
            self.job.key,
            lambda e: e["kind"] == "step" and (e["rank"], e["step"], e["attempt"]) == (rank, step, attempt),
            timeout_s=180,
            what=f"step {step} of rank {rank} of {self.name} under attempt {attempt}",
        )

    def last_step(self, attempt: int) -> int:
        return max((e["step"] for e in self.events("step") if e["attempt"] == attempt), default=0)

    def lose_pod(self, begun: Round, rank: int) -> None:
        """Lose the pod of a rank without notice: each of its containers is killed, and the pod gets no grace period."""
        pod = begun.pods[rank]
        found = self.job.pod(pod)
        assert found is not None
        node, status = self.bench.cluster.nodes[begun.nodes[rank]], found["status"]
        containers = [*status.get("initContainerStatuses", ()), *status["containerStatuses"]]
        running = [each["containerID"] for each in containers if "running" in each["state"]]
        pids = [node.container_pid(each) for each in running]
        # The kubelet is stopped first: a container that ends before its pod is deleted counts as a failure, not a deletion.
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.job.delete_pod(pod, force=True)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.bench.note(f"{pod} is lost")

    def assert_restored(self, back: Round, *, at_least: int) -> None:
        """Assert that every rank began at one step, with exactly the rows and dense parameters of that step."""
        assert {each["step"] for each in back.ranks.values()} == {back.step}, back
        assert back.step >= at_least, f"from step {back.step}, not {at_least}"
        assert all(each["exact"] is not False for each in back.ranks.values()), back
        earlier = [e for e in self.events("step") if e["step"] == back.step and e["attempt"] < back.attempt]
        newest = max(each["attempt"] for each in earlier)
        before = {each["rank"]: each for each in earlier if each["attempt"] == newest}
        assert len(before) == next(iter(before.values()))["world_size"], "a rank is missing at that step"
        assert total(back.ranks) == total(before), f"rows of step {back.step}"
        dense = {each["dense"] for ranks in (back.ranks, before) for each in ranks.values()}
        assert len(dense) == 1, f"dense parameters of step {back.step}"

    def assert_kept(self, back: Round, before: Round, *, lost: int, at: int, saved: int) -> None:
        """Assert that survivors have their rows of step `at`, and the lost rank has the saved rows.

        The comparison is bit for bit, and the dense part is that of step `at` on all ranks.
        """
        done = {
            (each["rank"], each["step"]): each
            for each in self.events("step")
            if each["attempt"] == before.attempt
        }
        steps = [saved if rank == lost else at for rank in range(back.world_size)]
        for rank, each in back.ranks.items():
            assert (each["mode"], each["exact"], each["step"]) == ("partial", False, at), each
            assert each["rank_steps"] == steps, each
            assert each["sums"] == done[rank, steps[rank]]["sums"], (
                f"rows of rank {rank} at step {steps[rank]}"
            )
            assert each["dense"] == done[0 if lost else 1, at]["dense"], f"dense parameters of rank {rank}"
        assert len({each["pls"] for each in back.ranks.values()}) == 1, back

    def assert_every_sample_once(self) -> None:
        """Assert for the first epoch that no sample is trained twice, and that a finished epoch omits none."""
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
        if over:  # each new division of an epoch omits the last samples, which are fewer than the ranks
            assert len(used) > SAMPLES - BATCH * max(each.world_size for each in rounds), len(used)
        self.bench.note(
            f"{self.name}: {len(used)} samples, each once; the epoch is {'' if over else 'not '}over"
        )


def total(ranks: Mapping[int, Event]) -> dict[str, int]:
    """Return the sums over all ranks, which describe the whole tables."""
    found: Counter[str] = Counter()
    for each in ranks.values():
        found.update(each["sums"])
    return {key: value % (1 << 64) for key, value in found.items()}


def indexed_job(
    bench: ScenarioBench,
    name: str,
    *,
    pods: int,
    nodes: str = "",
    env: Mapping[str, str] | None = None,
    volume: str = "",
    **more: Any,
) -> TrainingGroup:
    """Build an Indexed Job, and the headless Service by which its pods find pod 0.

    `env` is added to the ranks' environment; `volume` is where each pod has its own volume, which outlives its
    containers.
    """
    selector = {"batch.kubernetes.io/job-name": name}
    spec = {"clusterIP": "None", "selector": selector}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
    bench.cluster.api.create(f"/api/v1/namespaces/{bench.namespace}/services", service)
    manifest = bench.manifest(name, **more)
    template = manifest["spec"]["template"]
    template["spec"] = ranked(template["spec"], first=f"{name}-0.{name}", nodes=nodes or str(pods), env=env)
    template["spec"]["subdomain"] = name
    if volume:
        template["spec"]["volumes"] = [*template["spec"]["volumes"], {"name": "own", "emptyDir": {}}]
        trainer = template["spec"]["containers"][0]
        trainer["volumeMounts"] = [*trainer["volumeMounts"], {"name": "own", "mountPath": volume}]
    manifest["spec"] |= {
        "completionMode": "Indexed", "completions": pods, "parallelism": pods, "backoffLimit": 1000,
    }  # fmt: skip
    return TrainingGroup(bench, bench.applied(manifest))


def jobset(
    bench: ScenarioBench, name: str, *, pods: int, labels: Mapping[str, str] | None = None, **more: Any
) -> TrainingGroup:
    """Build a JobSet of one Job with `pods` pods; the end of any pod restarts all of them."""
    made = bench.manifest(name, **more)
    template = made["spec"]["template"]
    template["spec"] = ranked(template["spec"], first=f"{name}-workers-0-0.{name}", nodes=str(pods))
    template["spec"]["restartPolicy"] = "Never"
    spec = {"backoffLimit": 0, "completionMode": "Indexed", "completions": pods, "parallelism": pods}
    job = {
        "metadata": {"annotations": made["metadata"]["annotations"]},
        "spec": {**spec, "template": template},
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {**(labels or {})}},
        "spec": {
            "failurePolicy": {"maxRestarts": 20},
            "network": {"publishNotReadyAddresses": False},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": job}],
        },
    }
    return TrainingGroup(bench, bench.applied(manifest, JOBSET))
