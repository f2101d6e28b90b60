"""What obstore's errors mean."""

import pytest
from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.stores.abc import (
    AccessDenied,
    BucketMissing,
    ClockSkew,
    CredentialsMissing,
    ObjectExists,
    ObjectNotFound,
    RequestRefused,
    StoreFull,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.cloud.error_code import out_of_range, translated
from deltashard_checkpoint.stores.transport import CertificateRefused
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError

URL = "https://host/b/k?sig=topsecret"


def said(status: int, code: str = "", message: str = "") -> str:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>" if code else ""
    return f"Generic error: Error performing PUT {URL} in 1ms - Server returned non-2xx status code: {status} X: {body}"


def named(error: Exception, *, writes: bool = False, configured: bool = True) -> DeltashardError:
    return translated(
        error, where="gs://b/k", via_proxy=" through the proxy http://p:1", source="SOURCE", credentials_hint="do this",
        configured=configured, writes=writes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "writes", "meaning"),
    [
        (AlreadyExistsError(said(409, "BlobAlreadyExists")), True, ObjectExists),
        (AlreadyExistsError(said(412)), True, ObjectExists),
        (AlreadyExistsError(said(409, "ContainerBeingDeleted")), True, BucketMissing),
        (AlreadyExistsError(said(409, "BlobImmutableDueToPolicy")), True, RequestRefused),
        (PreconditionError(said(412, "ConditionNotMet")), False, StoreUnavailable),
        (FileNotFoundError(said(404, "BlobNotFound")), False, ObjectNotFound),
        (FileNotFoundError(said(404)), False, ObjectNotFound),
        (FileNotFoundError(said(404)), True, BucketMissing),
        (FileNotFoundError(said(404, "NoSuchBucket")), False, BucketMissing),
        (PermissionDeniedError(said(403, "AuthorizationFailure")), False, AccessDenied),
        (GenericError("Bulk delete request failed for key k: no (code: 403)"), False, AccessDenied),
        (GenericError(said(403, "AuthenticationFailed", "Request date header too old: 'x'")), False, ClockSkew),
        (GenericError(said(429)), True, StoreUnavailable),
        (GenericError(said(503, "ServerBusy")), True, StoreUnavailable),
        (GenericError(said(413, "AccountLimitExceeded")), True, StoreFull),
        (GenericError(said(400, "InvalidInput")), True, RequestRefused),
        (GenericError("x Debug source: InvalidCertificate(UnknownIssuer)"), True, CertificateRefused),
        (GenericError('x Debug source: "tcp connect error", kind: ConnectionRefused'), True, StoreUnavailable),
        (RuntimeError("what?"), True, StoreUnavailable),
    ],
)  # fmt: skip
def test_each_has_its_name(error: Exception, writes: bool, meaning: type[Exception]) -> None:
    found = named(error, writes=writes)
    assert type(found) is meaning
    assert "topsecret" not in str(found)


def test_a_token_that_did_not_come() -> None:
    """A machine's own identity may yet come; a named one is denied, or its service is away."""
    refused = GenericError(f"Error performing token request: {said(400)}")
    away = GenericError("Error performing token request: error sending request")
    assert type(named(refused, configured=False)) is CredentialsMissing
    assert type(named(away, configured=False)) is CredentialsMissing
    assert type(named(refused)) is AccessDenied
    assert type(named(away)) is StoreUnavailable
    assert "through the proxy http://p:1" in str(named(away))


def test_a_read_past_the_end() -> None:
    assert out_of_range(GenericError(said(416, "InvalidRange")))
    assert out_of_range(GenericError("Wanted range starting at 10, but object was only 10 bytes long"))
    assert not out_of_range(GenericError(said(404)))
