"""What a pod's hook and probe ask of its sidecar, over the unix socket: short calls of processes that end at once."""

from __future__ import annotations

import contextlib

import grpc
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.trainer_pb2_grpc import TrainerStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

NOTIFY_DEADLINE_S = 5.0
"""A hook must never hold the pod's end up, but a node that drains is a busy one."""
HEALTH_DEADLINE_S = 2.0


def notify(path: str, *, reason: str, deadline_s: float) -> None:
    """Have every trainer of the sidecar at `path` save now; nothing happens when nobody listens."""
    request = pb.NotifyRequest(reason=reason, deadline_s=deadline_s)
    with grpc.insecure_channel(f"unix:{path}") as channel, contextlib.suppress(grpc.RpcError):
        TrainerStub(channel).Notify(request, timeout=NOTIFY_DEADLINE_S)  # type: ignore[no-untyped-call]  # generated


def serves(path: str) -> bool:
    """Whether the sidecar at `path` says that it serves."""
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
