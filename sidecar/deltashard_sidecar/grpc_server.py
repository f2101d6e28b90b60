"""gRPC over a unix socket: messages become method calls on the `Sidecar`, and errors become status codes.

A failed call has `{error class}: {what} [where] -- {remedy}` as its details and its cause as trailing metadata.
FAILED_PRECONDITION, NOT_FOUND, ALREADY_EXISTS and PERMISSION_DENIED must be fixed by the caller. ABORTED means fenced,
UNAVAILABLE may be retried, and DATA_LOSS is a log or run that cannot be read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc
from deltashard_checkpoint.errors import DeltashardError, EnvironmentFault, FormatError, UserError
from deltashard_checkpoint.log.chain import CheckpointNotFound
from deltashard_checkpoint.log.selection import NothingRestorable
from deltashard_checkpoint.stores.abc import AccessDenied
from deltashard_checkpoint.write.fencing import FencedError
from deltashard_proto.cause import to_metadata
from deltashard_proto.message_limit import MESSAGE_OPTIONS
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1 import trainer_pb2_grpc

from deltashard_sidecar.save.preparation import Preparation
from deltashard_sidecar.save_service import SaveRefused
from deltashard_sidecar.session.session import UnknownSession
from deltashard_sidecar.sidecar import RankTaken, Sidecar
from deltashard_sidecar.telemetry.structured_logging import explain

MAX_CALLS = 256
"""Most concurrent calls: every trainer has a Watch and a Save, and possibly a Restore."""

CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (FencedError, grpc.StatusCode.ABORTED),
    (UnknownSession, grpc.StatusCode.NOT_FOUND),
    (CheckpointNotFound, grpc.StatusCode.NOT_FOUND),
    (RankTaken, grpc.StatusCode.ALREADY_EXISTS),
    (AccessDenied, grpc.StatusCode.PERMISSION_DENIED),
    (UserError, grpc.StatusCode.FAILED_PRECONDITION),
    (NothingRestorable, grpc.StatusCode.DATA_LOSS),
    (FormatError, grpc.StatusCode.DATA_LOSS),
    (EnvironmentFault, grpc.StatusCode.UNAVAILABLE),
)

Reply = TypeVar("Reply")
_BEFORE_BEGIN = frozenset({"ready", "prepare", "begin", "abort"})


def code_of(error: BaseException) -> grpc.StatusCode:
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class TrainerService(trainer_pb2_grpc.TrainerServicer):
    """The Trainer service of proto/, one method per call."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def _unary(self, name: str, context: grpc.ServicerContext, call: Callable[[], Reply]) -> Reply:
        try:
            return call()
        except DeltashardError as error:
            self._fail(name, context, error)

    def _fail(self, name: str, context: grpc.ServicerContext, error: DeltashardError) -> NoReturn:
        event = f"{name}.refused"
        self._sidecar.log.warning(event, **explain(error))
        context.set_trailing_metadata(to_metadata(error.cause))
        context.abort(code_of(error), f"{type(error).__name__}: {error}")
        raise AssertionError  # abort has raised

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:  # noqa: N802 - gRPC
        return self._unary("attach", context, lambda: self._sidecar.attach(request))

    def Open(self, request: pb.OpenRequest, context: grpc.ServicerContext) -> pb.OpenReply:  # noqa: N802 - gRPC
        return self._unary("open", context, lambda: self._sidecar.open(request))

    def Detach(self, request: pb.DetachRequest, context: grpc.ServicerContext) -> pb.DetachReply:  # noqa: N802 - gRPC
        return self._unary("detach", context, lambda: self._sidecar.detach(request))

    def Notify(self, request: pb.NotifyRequest, context: grpc.ServicerContext) -> pb.NotifyReply:  # noqa: ARG002, N802 - gRPC
        return pb.NotifyReply(trainers=self._sidecar.control.notify(request.reason, request.deadline_s))

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Notice]:  # noqa: N802 - gRPC
        try:
            session = self._sidecar.sessions.get(request.session)
            context.add_callback(session.notices.wake)
            yield from self._sidecar.control.watch(session, context.is_active)
        except DeltashardError as error:
            self._fail("watch", context, error)

    def Save(  # noqa: N802 - gRPC
        self, requests: Iterator[pb.SaveRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.SaveReply]:
        first = next(requests, None)
        kind = None if first is None else first.WhichOneof("kind")
        if first is None or kind not in ("ready", "begin"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a save starts with ready or begin")
            return
        session_id = first.ready.session if kind == "ready" else first.begin.session
        try:
            session = self._sidecar.sessions.get(session_id)
            with (
                session.presence.stream(context.cancel),
                closing(Preparation(self._sidecar.keeper, session.attachment.local_rank)) as preparation,
            ):
                begin: pb.SaveRequest.Begin | None = None
                for request in _before_begin(first, requests):
                    kind = request.WhichOneof("kind")
                    if kind == "prepare":
                        yield from self._sidecar.saves.prepare(session, request.prepare.begin, preparation)
                    elif kind in ("begin", "abort"):
                        preparation.stopped = True
                        begin = request.begin if kind == "begin" else None
                if begin is None:
                    return
                save = self._sidecar.begin(begin)
                save.start(prepared=preparation.transfer_blocks())
                name = f"save-{save.decisions.attempt}-{save.decisions.snapshot_id}"
                threading.Thread(target=save.read, args=(requests,), name=name, daemon=True).start()
                yield from save.replies()
        except SaveRefused as refused:
            yield refused.reply
        except DeltashardError as error:
            self._fail("save", context, error)

    def Restore(  # noqa: N802 - gRPC
        self, requests: Iterator[pb.RestoreRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.RestoreReply]:
        first = next(requests, None)
        if first is None or first.WhichOneof("kind") != "want":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a restore starts with want")
            return
        want = first.want
        try:
            session = self._sidecar.sessions.get(want.session)
            with session.presence.stream(context.cancel):
                yield from self._sidecar.restore(session, want, requests, context.is_active)
        except DeltashardError as error:
            self._fail("restore", context, error)


def _before_begin(first: pb.SaveRequest, requests: Iterator[pb.SaveRequest]) -> Iterator[pb.SaveRequest]:
    """Yield a stream's messages up to its begin. The stream may stay open long before it, and may break."""
    request: pb.SaveRequest | None = first
    while request is not None and (kind := request.WhichOneof("kind")) in _BEFORE_BEGIN:
        yield request
        if kind in ("begin", "abort"):
            return
        try:
            request = next(requests, None)
        except Exception:  # noqa: BLE001 - gRPC raises its own bare kinds for a stream that broke
            return


def start_server(sidecar: Sidecar, path: Path) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="call"), options=MESSAGE_OPTIONS)
    trainer_pb2_grpc.add_TrainerServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        TrainerService(sidecar), server
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    return server
