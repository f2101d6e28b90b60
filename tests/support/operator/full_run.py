"""A run with every field set, for tests that write and read it."""

from __future__ import annotations

from typing import Any, TypeVar

from deltashard_operator.run.condition import Condition
from deltashard_operator.run.failure import Crash, Loss
from deltashard_operator.run.ledger import Ledger
from deltashard_operator.run.observed_object import PodView, RequestedSettings, Workload, timestamp
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import Progress, RunPart, WatchedRun
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision, Measured
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
NOW_S = 1_000_000.0
WORKLOAD = Workload(namespace="team", kind="Job", name="train", uid="u-1", api_version="batch/v1")
CHOSEN = pb.Policy(
    every_s=300.0,
    every_steps=7,
    encoding="q8",
    differential="intermittent",
    goal="lost-work=5m",
    min_interval_s=30.0,
    max_interval_s=900.0,
    bits_goal="budget",
    min_bits=4,
    tables="emb.item=q4,emb.user=q8",
)
MESSAGE = "container trainer ended with exit code 1"
LOSS = Loss(at_s=NOW_S - 60, cause="Error", message=MESSAGE, pod="train-x", node="node-a")
CRASH = Crash(ending=MESSAGE, seq=7, at_s=NOW_S - 60, times=3)
RETAINED = tuple(
    {"seq": seq, "step": step, "time": timestamp(NOW_S - age_s), "bytes": 1 << 20, "pins": ["best"]}
    for seq, step, age_s in ((7, 1150, 30), (6, 1100, 330))
)
DECISION = Decision(
    subject="interval",
    goal="lost-work=5m",
    value="4 min",
    proposed="4 min",
    why="a failure loses at most 5 min, 58 s of them until a save is durable",
    bound="not below 58 s (a save takes 58 s to be durable)",
    evidence="1.5 lossy failures in 36 h",
    unreachable="at most 5 min of lost work cannot be had",
)


def changed(message: M, **fields: Any) -> M:
    return type(message)(**{field.name: value for field, value in message.ListFields()} | fields)


def full_run() -> WatchedRun:
    return WatchedRun(
        workload=WORKLOAD,
        requested=RequestedSettings(policy="fast"),
        pods={
            "p-1": PodView(
                uid="p-1",
                name="train-x",
                workload=WORKLOAD,
                requested=RequestedSettings(),
                node="node-a",
                index="0",
            )
        },
        parts={"": RunPart(attempt=34, seq=7, committed_at_s=NOW_S - 30, kept=RETAINED)},
        ledger=Ledger(
            restores=2,
            lost_steps=50,
            restored={"": (33, 34)},
            failures=3,
            attempts_opened={"": 4},
            crashes={"": CRASH},
            counted={"k-1": NOW_S - 60},
        ),
        losses=(LOSS,),
        progress=Progress(
            step=1200,
            last_step=1150,
            last_commit_at_s=NOW_S - 30,
            last_seq=7,
            attempt=34,
            world_size=8,
            ranks_present=2,
            stall_s=0.125,
            lost_share=0.00075,
            partial_recoveries=1,
            stored_bytes=1 << 30,
            checkpoints=5,
            policy=CHOSEN,
            measured=Measured(
                step_s=0.25,
                stall_s=0.03,
                slowdown_s=0.5,
                cost_s=0.53,
                durable_s=58.0,
                restore_s=12.0,
                reschedule_s=40.0,
                saves=64,
            ),
            decisions=(DECISION,),
        ),
        phase=Phase.TRAINING,
        training_since_s=NOW_S - 100,
        trained_s=150000.0,
        reconciled_s=NOW_S,
        conditions=(
            Condition(type="Ready", status="True", reason="Checkpointing", message="x", since_s=NOW_S - 100),
        ),
        store="s3://bucket/prefix",
    )
