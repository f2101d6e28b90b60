"""Stream of a sidecar: who may have one, what waits to be sent on it, and how its end is told.

How a call ends tells the sidecar what to do: OK, UNAVAILABLE, NOT_FOUND and RESOURCE_EXHAUSTED mean come again (with a
jittered back-off), ABORTED means a newer stream of its process has taken its place, and the others are errors to
report: UNAUTHENTICATED, PERMISSION_DENIED, INVALID_ARGUMENT, FAILED_PRECONDITION (no common protocol), INTERNAL (come
again all the same, but say it).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from deltashard_proto.v1 import fleet_pb2 as wire

from deltashard_operator.fleet.sidecar_report import Directive, Hello
from deltashard_operator.fleet.token_review import PodIdentity

MAX_SAVES = 8
"""Save requests that may wait on one stream."""
REJECTIONS = (
    "bad_report",
    "no_token",
    "not_authentic",
    "wrong_pod",
    "review_unavailable",
    "unknown_pod",
    "refused",
    "no_protocol",
    "too_many",
    "no_hello",
    "failed",
)
ENDS = ("gone", "silent", "reauthenticate", "replaced", "slow", "stopping", "bad_report", "failed")

_log = structlog.get_logger("deltashard.fleet")


@dataclass(slots=True, eq=False)
class Stream:
    """Welcomed stream of a sidecar: what waits to be sent, and why it ends."""

    hello: Hello
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ack: int = 0
    """Newest incident to acknowledge; 0: none."""
    directive: Directive | None = None
    """Directive to be sent."""
    saves: deque[wire.SaveRequested] = field(default_factory=deque)
    end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    left: bool = False

    def finish(self, cause: str) -> None:
        """End it for this cause of `ENDS`, if nothing ended it before."""
        if not self.end.done():
            self.end.set_result(cause)

    def pending(self) -> list[wire.ReportReply]:
        """What waits, taken out; acknowledgements first, for they free the sidecar's memory."""
        replies = []
        if self.ack:
            replies.append(wire.ReportReply(ack=wire.ReportReply.Ack(incident=self.ack)))
            self.ack = 0
        if self.directive is not None:
            replies.append(wire.ReportReply(directive=self.directive.message()))
            self.directive = None
        replies += [wire.ReportReply(save_now=each) for each in self.saves]
        self.saves.clear()
        return replies


class Rejection(Exception):
    """End of a call before its welcome: cause (of `REJECTIONS`), status and a sentence."""

    def __init__(self, cause: str, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.cause = cause
        self.code = code
        self.sentence = sentence


ENDINGS = {
    "silent": (grpc.StatusCode.UNAVAILABLE, "no heartbeat came for three intervals: come again"),
    "replaced": (grpc.StatusCode.ABORTED, "a newer stream of this process took its place"),
    "slow": (grpc.StatusCode.UNAVAILABLE, "what was sent was not taken in time: come again"),
    "stopping": (grpc.StatusCode.UNAVAILABLE, "the controller stops: come again"),
    "bad_report": (grpc.StatusCode.INVALID_ARGUMENT, "after Hello only heartbeats are expected"),
    "failed": (grpc.StatusCode.INTERNAL, "the controller failed; see its log"),
}
"""How a welcomed stream's end is told; those not here end in good order."""


def host_of(peer: str) -> str:
    """The address of gRPC's `ipv4:10.0.0.7:51234` without its port."""
    return peer.rpartition(":")[0]


def token_of(context: Any) -> str:
    """The token a call came with; raises `Rejection`."""
    values = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not token:
        sentence = (
            "metadata `authorization: Bearer TOKEN` is missing: project the pod's token into the sidecar"
        )
        raise Rejection("no_token", grpc.StatusCode.UNAUTHENTICATED, sentence)
    return str(token)


def match(hello: Hello, identity: PodIdentity) -> None:
    """Hello may only speak of the token's pod; raises `Rejection`."""
    said = (hello.namespace, hello.pod, hello.pod_uid)
    if said != (identity.namespace, identity.pod, identity.pod_uid):
        _log.warning("fleet.wrong_pod", said=said, is_=(identity.namespace, identity.pod, identity.pod_uid))
        sentence = f"Hello is of pod {hello.namespace}/{hello.pod} ({hello.pod_uid}), the token is of another"
        raise Rejection("wrong_pod", grpc.StatusCode.PERMISSION_DENIED, sentence)
