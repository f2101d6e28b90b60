"""What a pod's preStop hook asks of its sidecar, over the unix socket: a short call of a process that ends at once."""

from __future__ import annotations

import contextlib

import grpc
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.trainer_pb2_grpc import TrainerStub

NOTIFY_DEADLINE_S = 5.0
"""A hook must never hold the pod's end up, but a node that drains is a busy one."""


def notify(path: str, *, reason: str, deadline_s: float) -> None:
    """Have every trainer of the sidecar at `path` save now; nothing happens when nobody listens."""
    request = pb.NotifyRequest(reason=reason, deadline_s=deadline_s)
    with grpc.insecure_channel(f"unix:{path}") as channel, contextlib.suppress(grpc.RpcError):
        TrainerStub(channel).Notify(request, timeout=NOTIFY_DEADLINE_S)  # type: ignore[no-untyped-call]  # generated
