"""Causes on the wire: a closed set of values."""

from __future__ import annotations

import grpc
import pytest
from deltashard.attach.rpc_error import UNANSWERED, cause_of, translate
from deltashard.errors import (
    FencedError,
    RestoreFailed,
    SidecarGone,
    SidecarUnavailable,
    TakenOver,
    UserError,
)
from deltashard_checkpoint.cache.pack_spool import CacheFull
from deltashard_checkpoint.errors import CorruptObject, DeltashardError, EnvironmentFault, UnsupportedVersion
from deltashard_checkpoint.log.chain import ChainIncomplete, CheckpointNotFound
from deltashard_checkpoint.log.log_error import AppendUnknown, LogRemoved, LogRolledBack, LogStopped
from deltashard_checkpoint.restore.plan import SchemaMismatch
from deltashard_checkpoint.stores.abc import (
    AccessDenied,
    BucketMissing,
    ClockSkew,
    CredentialsMissing,
    RequestRefused,
    StoreFull,
    StoreUnavailable,
)
from deltashard_checkpoint.write.part_writer import UploadFailed, UploadNoSpace
from deltashard_checkpoint.write.snapshot_reports import SnapshotAbandoned
from deltashard_proto.cause import METADATA, Cause, from_metadata, to_metadata
from deltashard_sidecar import restore
from deltashard_sidecar.arena.batch import BadBatch
from deltashard_sidecar.arena.block import NotGranted
from deltashard_sidecar.run import store_health
from deltashard_sidecar.save import save
from deltashard_sidecar.settings import SettingError


class FailedCall(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """A failed call with the given status."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...] | None
    ) -> None:
        self._result = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._result[0]

    def details(self) -> str:
        return self._result[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...] | None:
        return self._result[2]


FailedCall.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("cause", "code", "details", "kind", "text"),
    [
        (Cause.TAKEN_OVER, grpc.StatusCode.ABORTED, "TakenOver: x", TakenOver, "x [open]"),
        (
            Cause.FENCED, grpc.StatusCode.ABORTED, "FencedError: x", FencedError,
            "a newer attempt has taken over this run: FencedError: x [open] -- end this process; the newer one continues training",
        ),
        (Cause.LOST, grpc.StatusCode.NOT_FOUND, "UnknownSession: x", SidecarGone, "NOT_FOUND: UnknownSession: x [open]"),
        (Cause.STOPPING, grpc.StatusCode.UNAVAILABLE, "Stopping: x", SidecarGone, "UNAVAILABLE: Stopping: x [open]"),
        (Cause.ERROR, grpc.StatusCode.NOT_FOUND, "CheckpointNotFound: x", UserError, "CheckpointNotFound: x [open]"),
        (Cause.ERROR, grpc.StatusCode.INTERNAL, "x", SidecarUnavailable, "INTERNAL: x [open]"),
    ],
)  # fmt: skip
def test_refused_call_maps_to_the_error_of_its_cause(
    cause: Cause, code: grpc.StatusCode, details: str, kind: type, text: str
) -> None:
    error = translate(FailedCall(code, details, to_metadata(cause)), where="open")
    assert type(error) is kind
    assert str(error) == text


def test_unanswered_call_has_no_cause() -> None:
    """Without metadata the sidecar has exited. An unreachable store is an answer of the sidecar."""
    for code in UNANSWERED:
        unanswered = FailedCall(code, "connection refused", None)
        assert cause_of(unanswered) == ""
        assert type(translate(unanswered, where="open", fallback=RestoreFailed)) is SidecarGone
    store = FailedCall(grpc.StatusCode.UNAVAILABLE, "StoreUnavailable: x", to_metadata(Cause.UNAVAILABLE))
    assert type(translate(store, where="open", fallback=RestoreFailed)) is RestoreFailed
    assert from_metadata(to_metadata("not a cause")) is Cause.ERROR
    assert to_metadata(Cause.FENCED)[0][0] == METADATA


@pytest.mark.parametrize(
    ("error", "of_save", "of_restore", "of_store"),
    [
        (AppendUnknown("x"), "unavailable", "unavailable", "unavailable"),
        (StoreUnavailable("x"), "unavailable", "unavailable", "unavailable"),
        (CacheFull("x"), "unavailable", "unavailable", None),
        (UploadFailed("x"), "unavailable", "unavailable", None),
        (UploadNoSpace("x"), "full", "unavailable", None),
        (SnapshotAbandoned("x"), "abandoned", "unavailable", None),
        (LogRolledBack("x"), "log_lost", "unavailable", None),
        (LogRemoved("x"), "removed", "unavailable", None),
        (LogStopped("x"), "error", "invalid", None),
        (CorruptObject("x"), "error", "invalid", None),
        (ChainIncomplete("x"), "error", "invalid", None),
        (UnsupportedVersion("x"), "error", "error", None),
        (BadBatch("x"), "invalid", "error", "refused"),
        (NotGranted("x"), "invalid", "error", "refused"),
        (save.Cancelled("x"), "deadline", "unavailable", None),
        (CheckpointNotFound("x"), "error", "not_found", "refused"),
        (SchemaMismatch("x"), "error", "mismatch", "refused"),
        (CredentialsMissing("x"), "error", "error", "missing"),
        (AccessDenied("x"), "error", "error", "denied"),
        (BucketMissing("x"), "error", "error", "bucket_missing"),
        (StoreFull("x"), "full", "unavailable", "full"),
        (ClockSkew("x"), "error", "error", "clock"),
        (RequestRefused("x"), "error", "error", "refused"),
        (SettingError("x"), "error", "error", "refused"),
        (EnvironmentFault("x"), "error", "unavailable", None),
        (DeltashardError("x"), "error", "error", None),
        (ValueError("x"), "error", "error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_error_maps_to_one_cause_per_operation(
    error: Exception, of_save: str, of_restore: str, of_store: str | None
) -> None:
    """The columns are a failed save, a failed restore, and an unusable store."""
    assert save.cause_of(error) == of_save
    assert restore.cause_of(error) == of_restore
    if not isinstance(error, (CacheFull, UploadFailed)):  # no store raises these
        assert store_health.cause_of(error) == of_store
