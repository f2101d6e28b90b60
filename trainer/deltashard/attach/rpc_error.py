"""What a failed call to the sidecar means: the sidecar is gone, or this is its answer. One table for every call.

The first line that fits:

    cause taken_over                                  `TakenOver`: the process ends
    cause fenced, or ABORTED                          `FencedError`: the process ends
    cause stopping: SIGTERM came                      `SidecarGone`: tried again
    cause lost: another sidecar, without the session  `SidecarGone`: tried again
    no cause, and one of `UNANSWERED`                 `SidecarGone`: tried again
    one of `_CALLER_ERRORS`                                 `UserError`: final
    anything else, with the sidecar's own words       `SidecarUnavailable` or `RestoreFailed`: final

`attach.retry` tries again. A sidecar process that was killed or is not ready in time is gone, too; one that ended by
itself with an exit code has given its answer (`attach.launcher`).
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
"""Without a cause of the sidecar's: nobody answered."""
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
    """Why the sidecar refused a call; empty: no answer came."""
    return from_metadata(error.trailing_metadata()) if isinstance(error, grpc.Call) else ""


def translate(
    error: grpc.RpcError, *, where: str, fallback: type[Exception] = SidecarUnavailable
) -> Exception:
    """The trainer's error for a failed call, by the table."""
    code, message = details(error)
    cause = cause_of(error)
    if cause == Cause.TAKEN_OVER:
        return TakenOver(message.removeprefix("TakenOver: "), where=where)
    if code == grpc.StatusCode.ABORTED or cause == Cause.FENCED:
        return FencedError(
            f"a newer attempt has taken over this run: {message}",
            where=where,
            remedy="end this process; the newer one trains on",
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
