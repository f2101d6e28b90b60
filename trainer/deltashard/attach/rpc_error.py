"""Classifies failed calls of the sidecar as a lost sidecar or as its answer, by one table for all calls.

The first matching line applies:

    cause taken_over                                  `TakenOver`: the process ends
    cause fenced, or ABORTED                          `FencedError`: the process ends
    cause stopping: SIGTERM was received              `SidecarGone`: retried
    cause lost: another sidecar, without the session  `SidecarGone`: retried
    no cause, and one of `UNANSWERED`                 `SidecarGone`: retried
    one of `_CALLER_ERRORS`                           `UserError`: final
    anything else                                     `SidecarUnavailable` or `RestoreFailed`: final

`attach.retry` retries. A sidecar process that was killed or is not ready in time also counts as lost; an exit code of
its own counts as an answer (`attach.launcher`).
"""

from __future__ import annotations

import grpc
from deltashard_proto.cause import Cause, from_metadata

from deltashard.errors import (
    FencedError,
    RestoreFailed,
    SidecarGone,
    SidecarUnavailable,
    TakenOver,
    UserError,
)

UNANSWERED = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)
"""Codes that mean, without a cause from the sidecar, that there was no answer."""
_GONE = (Cause.STOPPING, Cause.LOST)
_CALLER_ERRORS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
)


def details(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    message = error.details() if isinstance(error, grpc.Call) else str(error)
    return code, message or ""


def cause_of(error: grpc.RpcError) -> str:
    """Return the cause with which the sidecar rejected a call; empty without an answer."""
    return from_metadata(error.trailing_metadata()) if isinstance(error, grpc.Call) else ""


def translate(
    error: grpc.RpcError, *, where: str, fallback: type[Exception] = SidecarUnavailable
) -> Exception:
    """Return the trainer's error for a failed call, according to the table."""
    code, message = details(error)
    cause = cause_of(error)
    if cause == Cause.TAKEN_OVER:
        return TakenOver(message.removeprefix("TakenOver: "), where=where)
    if code == grpc.StatusCode.ABORTED or cause == Cause.FENCED:
        return FencedError(
            f"a newer attempt has taken over this run: {message}",
            where=where,
            remedy="end this process; the newer one continues training",
        )
    if cause in _GONE or (not cause and code in UNANSWERED):
        return SidecarGone(f"{code.name}: {message}", where=where)
    if code in _CALLER_ERRORS:
        return UserError(message, where=where)
    if fallback is RestoreFailed:
        return RestoreFailed(
            f"{code.name}: {message}", where=where, remedy="remove the cause, then call restore() again"
        )
    return SidecarUnavailable(f"{code.name}: {message}", where=where)
