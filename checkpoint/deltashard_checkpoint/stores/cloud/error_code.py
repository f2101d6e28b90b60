"""Translate obstore's errors for Google and Azure into the store errors of this package.

obstore distinguishes a few cases by class and the rest in its text, by HTTP status and server code. Both stay in the
message; addresses are printed without their query, which may hold a signature.
"""

from __future__ import annotations

import re

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.stores.abc import (
    AccessDenied,
    BucketMissing,
    ClockSkew,
    ConditionalPutUnsupported,
    CredentialsMissing,
    ObjectExists,
    ObjectNotFound,
    RequestRefused,
    StoreFull,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.transport import certificate_refused

_STATUS = re.compile(r"(?:non-2xx status code: |\(code: )(\d{3})")
"""Status of a response, or of one of several deletions in one request."""
_CODES = (re.compile(r"<Code>\s*([A-Za-z0-9]+)\s*</Code>"), re.compile(r'"reason":\s*"([A-Za-z0-9]+)"'))
_MESSAGES = (re.compile(r"<Message>\s*([^<]*?)\s*</Message>"), re.compile(r'"message":\s*"([^"]*)"'))
_QUERY = re.compile(r"\?\S*")
_TOKEN = ("token request", "performing token", "metadata", "federated", "oauth", "OAuth")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"})
_TAKEN = frozenset({"", "BlobAlreadyExists", "ConditionNotMet", "conditionNotMet", "PreconditionFailed"})
_FULL = frozenset({"QuotaExceeded", "quotaExceeded", "AccountLimitExceeded", "InsufficientStorage"})
_SKEWED = (
    "Request date header too old",
    "Token must be a short-lived token",
    "Check your iat and exp values",
    "RequestTimeTooSkewed",
)


def out_of_range(error: Exception) -> bool:
    """Return whether a read was rejected because the object ends before its range."""
    return _status(str(error)) == 416 or "Wanted range starting at" in str(error)


def _status(text: str) -> int:
    """Return the HTTP status in obstore's text; 0 if there is none."""
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def translated(  # noqa: C901
    error: Exception,
    *,
    where: str,
    via_proxy: str,
    source: str,
    credentials_hint: str,
    configured: bool,
    writes: bool = False,
) -> DeltashardError:
    """Return the store error for an obstore error at `where`.

    `via_proxy` describes the proxy; `source` and `credentials_hint` the credentials; `configured`: whether some are
    configured; `writes`: the request was a put.
    """
    if isinstance(error, DeltashardError):
        return error
    if not isinstance(error, (BaseError, OSError, ValueError)):
        return StoreUnavailable(f"{type(error).__name__}: {error}", where=where + via_proxy)
    text = str(error).partition("Debug source:")[0]
    status = _status(text)
    code = next((found[1] for each in _CODES if (found := each.search(text))), "")
    message = _error_message(str(error), status, code)
    if any(each in text for each in _SKEWED):
        return ClockSkew(message, where=where, remedy="set this machine's clock (NTP)")
    if any(each in text for each in _TOKEN) and not isinstance(error, FileNotFoundError):
        return _no_token(message, status, where + via_proxy, source, credentials_hint, configured=configured)
    if (
        code in _NO_BUCKET
        or "specified container does not exist" in text
        or (writes and isinstance(error, FileNotFoundError))
    ):
        return BucketMissing(
            message, where=where, remedy="create the bucket (container), or correct the store URL"
        )
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(message, where=where)
    if isinstance(error, (AlreadyExistsError, PreconditionError)):
        return _conflict(message, code, where, writes=writes)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or status in {401, 403}:
        return AccessDenied(
            message,
            where=where,
            remedy=f"credentials come from {source}; check them, and the roles they have for the bucket (container)",
        )
    if isinstance(error, NotSupportedError) or status == 501:
        return ConditionalPutUnsupported(message, where=where, remedy="use Google's or Azure's own storage")
    if code in _FULL or status == 507:
        return StoreFull(message, where=where, remedy="free space in the store, or raise the quota")
    if status >= 500 or status in {408, 429}:
        return StoreUnavailable(message, where=where)
    if status:
        return RequestRefused(message, where=where)
    if "certificate" in str(error).lower() or "InvalidCertificate" in str(error):
        return certificate_refused(_certificate(str(error)), where=where + via_proxy)
    return StoreUnavailable(_network(str(error)), where=where + via_proxy)


def _conflict(message: str, code: str, where: str, *, writes: bool) -> DeltashardError:
    if not writes:
        return StoreUnavailable("object was replaced while it was read", where=where)
    if code in _TAKEN:
        return ObjectExists(message, where=where)
    return RequestRefused(message, where=where)


def _no_token(
    message: str, status: int, where: str, source: str, credentials_hint: str, *, configured: bool
) -> DeltashardError:
    if not configured:  # a machine without an identity, or with a metadata server that is not up yet
        return CredentialsMissing(
            f"{source} returned no credentials: {message}", where=where, remedy=credentials_hint
        )
    if status == 0 or status >= 500 or status in {408, 429}:
        return StoreUnavailable(
            f"{source} returned no credentials: {message}", where=where, remedy="is the token service up?"
        )
    return AccessDenied(f"{source} returned no credentials: {message}", where=where, remedy=credentials_hint)


def _error_message(error: str, status: int, code: str) -> str:
    text = error.partition("Debug source:")[0]
    message = next((found[1] for each in _MESSAGES if (found := each.search(text))), "")
    if not status:
        return _network(error)
    return f"{code or status}: {message.partition(chr(10))[0]}".rstrip(": ")[:300]


def _certificate(text: str) -> str:
    found = re.search(r"invalid peer certificate: ([A-Za-z]+)", text) or re.search(
        r"InvalidCertificate\(([A-Za-z]+)", text
    )
    return f"the certificate is not accepted ({found[1]})" if found else "the certificate is not accepted"


def _network(text: str) -> str:
    """Describe the network failure of an error without a response."""
    lower = text.lower()
    for sign, reason in (
        ("connection refused", "no connection: Connection refused"),
        ("tcp connect error", "no connection"),
        ("dns error", "no connection: the name is not known"),
        ("tunnelunsuccessful", "no connection: the proxy refused the tunnel"),
        ("timedout", "no connection in time"),
        ("timed out", "no connection in time"),
        ("connection reset", "connection broke: it was reset"),
        ("incompletemessage", "connection broke: the answer breaks off"),
        ("incomplete message", "connection broke: the answer breaks off"),
    ):
        if sign in lower:
            return reason
    return " ".join(_QUERY.sub("", text.partition("Debug source:")[0]).split())[:300]
