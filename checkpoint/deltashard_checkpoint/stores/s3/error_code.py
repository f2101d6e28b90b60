"""Translate S3 error codes and socket errors into the store errors of this package.

The store's code stays in the message. Unknown server errors (5xx, 429) are retryable, client errors (4xx) not.
"""

from __future__ import annotations

import http.client
import re

import urllib3
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.stores.abc import (
    AccessDenied,
    BucketMissing,
    ClockSkew,
    ConditionalPutUnsupported,
    ObjectExists,
    ObjectNotFound,
    RequestRefused,
    StoreFull,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.transport import certificate_refused

LARGEST_SKEW_S = 600.0
"""A signature rejected with a larger clock difference is a clock problem (S3 allows 900 s)."""

EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "InvalidTokenId", "TokenRefreshRequired"}
)
_DENIED = EXPIRED | {
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "AccountProblem",
    "AllAccessDisabled",
    "UnauthorizedAccess",
    "Forbidden",
    "InvalidSecurity",
    "NotSignedUp",
    "XMinioInvalidIAMCredentials",
}
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestExpired", "RequestNotValidYet"})
_SKEWED_TEXTS = ("Request is not valid yet", "Request has expired", "not valid yet")
_FULL = frozenset(
    {"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "InsufficientStorage"}
)
_WAIT = frozenset(
    {
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "ServiceUnavailable",
        "InternalError",
        "RequestTimeout",
        "OperationAborted",
        "ConditionalRequestConflict",
        "ServerNotInitialized",
        "XMinioServerNotInitialized",
        "BadDigest",
        "XAmzContentChecksumMismatch",
        "IncompleteBody",
        "TooManyRequests",
    }
)
_ENCRYPTION = re.compile(r"server side encryption|\bKMS\b", re.IGNORECASE)
_REGION = frozenset(
    {"PermanentRedirect", "Redirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)


def translated(
    error: Exception, *, where: str, skew_s: float | None = None, source: str = "", via_proxy: str = ""
) -> DeltashardError:
    """Return the store error for an error of minio-py or urllib3 at `where`; `via_proxy` describes the proxy.

    `skew_s` is how far the local clock is ahead of the store's, if known; `source` names the source of the credentials.
    """
    if isinstance(error, DeltashardError):
        return error
    if isinstance(error, S3Error):
        status = error.response.status
        return refused(
            error.code or "", error.message or "", status, where=where, skew_s=skew_s, source=source
        )
    if isinstance(error, ServerError):
        return refused("", str(error), error.status_code, where=where, skew_s=skew_s, source=source)
    if isinstance(error, InvalidResponseError):
        text = " ".join(str(error).split())[:200]  # not S3's XML: from a proxy or another service
        status = getattr(error, "_code", 0)
        return refused(
            "", text, status if isinstance(status, int) else 0, where=where, skew_s=skew_s, source=source
        )
    if isinstance(error, urllib3.exceptions.SSLError):
        return certificate_refused(str(error), where=where + via_proxy)
    if isinstance(error, (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)):
        return StoreUnavailable(_network_text(error), where=where + via_proxy)
    if isinstance(error, (MinioException, ValueError)):
        return RequestRefused(
            str(error) or type(error).__name__,
            where=where,
            remedy="check the store URL: bucket, endpoint, region",
        )
    return StoreUnavailable(f"{type(error).__name__}: {error}", where=where)


def refused(
    code: str, message: str, status: int, *, where: str, skew_s: float | None = None, source: str = ""
) -> DeltashardError:
    """Return the store error for a response with this S3 error `code`, `message` and HTTP `status`."""
    description = f"{code or status}: {message}".rstrip(": ")
    if code in _SKEWED or any(text in message for text in _SKEWED_TEXTS):
        return _skewed(description, where, skew_s)
    if code in _DENIED or status in {401, 403}:
        if skew_s is not None and abs(skew_s) > LARGEST_SKEW_S:
            return _skewed(description, where, skew_s)
        using = f"credentials come from {source}; " if source else ""
        return AccessDenied(
            description, where=where, remedy=f"{using}check key, secret and the policy of the bucket"
        )
    if code == "NoSuchBucket":
        return BucketMissing(description, where=where, remedy="create the bucket, or correct the store URL")
    if code in {"NoSuchKey", "NoSuchVersion"} or (status == 404 and not code):
        return ObjectNotFound(description, where=where)
    if code == "PreconditionFailed" or (status == 412 and not code):
        return ObjectExists(description, where=where)
    if _ENCRYPTION.search(message) or code.startswith("KMS."):
        return RequestRefused(
            description,
            where=where,
            remedy="give the store a key service with this key, or leave sse out of its URL",
        )
    if code in {"NotImplemented", "MethodNotAllowed"} or status == 501:
        return ConditionalPutUnsupported(
            description,
            where=where,
            remedy="use a store that honours If-None-Match on PUT: S3, or MinIO of 2024 or newer",
        )
    if code in _FULL or status == 507:
        return StoreFull(description, where=where, remedy="free space in the store, or raise the quota")
    if code in _REGION or status in {301, 307, 308}:
        return RequestRefused(
            description, where=where, remedy="set the bucket's region: ?region=... in the URL, or AWS_REGION"
        )
    if code in _WAIT or status >= 500 or status in {408, 429}:
        return StoreUnavailable(description, where=where)
    return RequestRefused(description, where=where)


def _skewed(description: str, where: str, skew_s: float | None) -> ClockSkew:
    apart = ""
    if skew_s is not None:
        apart = f"; this machine is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store"
    return ClockSkew(
        description + apart, where=where, remedy="set this machine's clock (NTP), or the store's"
    )


def _network_text(error: Exception) -> str:
    if isinstance(error, urllib3.exceptions.ProxyError):
        return f"the proxy failed: {_network_text(error.original_error)}"
    if isinstance(
        error, urllib3.exceptions.NewConnectionError
    ):  # also a ConnectTimeoutError, so checked first
        reason = str(error.__cause__ or error)
        return f"no connection: {reason.rpartition(': ')[2]}"
    if isinstance(error, urllib3.exceptions.ConnectTimeoutError):
        return "no connection in time"
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return "the store went silent"
    if isinstance(error, urllib3.exceptions.ProtocolError) and error.args:
        cause = error.args[-1]
        return (
            f"connection broke: {cause!r}"
            if isinstance(cause, Exception)
            else f"connection broke: {error.args[0]}"
        )
    return f"{type(error).__name__}: {error}"
