"""The meaning of obstore's errors."""

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


def response_text(status: int, code: str = "", message: str = "") -> str:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>" if code else ""
    return f"Generic error: Error performing PUT {URL} in 1ms - Server returned non-2xx status code: {status} X: {body}"


def mapped(error: Exception, *, writes: bool = False, configured: bool = True) -> DeltashardError:
    return translated(
        error, where="gs://b/k", via_proxy=" through the proxy http://p:1", source="SOURCE", credentials_hint="do this",
        configured=configured, writes=writes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "writes", "meaning"),
    [
        (AlreadyExistsError(response_text(409, "BlobAlreadyExists")), True, ObjectExists),
        (AlreadyExistsError(response_text(412)), True, ObjectExists),
        (AlreadyExistsError(response_text(409, "ContainerBeingDeleted")), True, BucketMissing),
        (AlreadyExistsError(response_text(409, "BlobImmutableDueToPolicy")), True, RequestRefused),
        (PreconditionError(response_text(412, "ConditionNotMet")), False, StoreUnavailable),
        (FileNotFoundError(response_text(404, "BlobNotFound")), False, ObjectNotFound),
        (FileNotFoundError(response_text(404)), False, ObjectNotFound),
        (FileNotFoundError(response_text(404)), True, BucketMissing),
        (FileNotFoundError(response_text(404, "NoSuchBucket")), False, BucketMissing),
        (PermissionDeniedError(response_text(403, "AuthorizationFailure")), False, AccessDenied),
        (GenericError("Bulk delete request failed for key k: no (code: 403)"), False, AccessDenied),
        (GenericError(response_text(403, "AuthenticationFailed", "Request date header too old: 'x'")), False, ClockSkew),
        (GenericError(response_text(429)), True, StoreUnavailable),
        (GenericError(response_text(503, "ServerBusy")), True, StoreUnavailable),
        (GenericError(response_text(413, "AccountLimitExceeded")), True, StoreFull),
        (GenericError(response_text(400, "InvalidInput")), True, RequestRefused),
        (GenericError("x Debug source: InvalidCertificate(UnknownIssuer)"), True, CertificateRefused),
        (GenericError('x Debug source: "tcp connect error", kind: ConnectionRefused'), True, StoreUnavailable),
        (RuntimeError("what?"), True, StoreUnavailable),
    ],
)  # fmt: skip
def test_obstore_errors_are_mapped(error: Exception, writes: bool, meaning: type[Exception]) -> None:
    found = mapped(error, writes=writes)
    assert type(found) is meaning
    assert "topsecret" not in str(found)


def test_failed_token_request_is_mapped_by_the_kind_of_identity() -> None:
    """A machine's own identity may appear later. A configured identity is denied, or its service is unavailable."""
    refused = GenericError(f"Error performing token request: {response_text(400)}")
    unreachable = GenericError("Error performing token request: error sending request")
    assert type(mapped(refused, configured=False)) is CredentialsMissing
    assert type(mapped(unreachable, configured=False)) is CredentialsMissing
    assert type(mapped(refused)) is AccessDenied
    assert type(mapped(unreachable)) is StoreUnavailable
    assert "through the proxy http://p:1" in str(mapped(unreachable))


def test_read_past_the_end_is_recognized() -> None:
    assert out_of_range(GenericError(response_text(416, "InvalidRange")))
    assert out_of_range(GenericError("Wanted range starting at 10, but object was only 10 bytes long"))
    assert not out_of_range(GenericError(response_text(404)))
