"""A store in a bucket of MinIO, S3 or a compatible service, through minio-py.

Uploads bypass minio-py's `put_object`, which copies and hashes: the request's headers are signed (`UNSIGNED-PAYLOAD`)
and the caller's memory is sent over the same connections, in slices. The server verifies a CRC-32 header, which
protects the bytes in transit. **Create-only is the header `If-None-Match: *` of the request**; passed to minio-py as
`metadata=` it would become user metadata, and the put would overwrite. Reads stream into the caller's buffer; a read
that breaks off continues by range, pinned to the same ETag.

The payload is not signed, so over plain http an attacker in the path could change it until a restore checks a frame's
hash. The store warns once about an endpoint that is neither TLS nor on this machine.
"""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit, urlunsplit

from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import S3Error
from minio.signer import sign_v4_s3
from minio.time import to_amz_date, utcnow
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from deltashard_checkpoint.errors import CorruptObject, DeltashardError
from deltashard_checkpoint.stores.abc import (
    BucketMissing,
    Buffer,
    ObjectInfo,
    ObjectNotFound,
    RequestRefused,
    Store,
    StoreUnavailable,
    check_size,
)
from deltashard_checkpoint.stores.deadline import IDLE_TIMEOUT_S
from deltashard_checkpoint.stores.key_rule import check_key, check_prefix
from deltashard_checkpoint.stores.retry import ResumedListing
from deltashard_checkpoint.stores.s3.connection import SLICE_BYTES, Connections, check_deadline, slices
from deltashard_checkpoint.stores.s3.credentials import StandardProvider
from deltashard_checkpoint.stores.s3.encryption import Encryption
from deltashard_checkpoint.stores.s3.error_code import (
    EXPIRED,
    LARGEST_SKEW_S,
    refused,
    translated,
)
from deltashard_checkpoint.stores.transport import checked_endpoint, proxy_of, via_proxy, warn_if_plaintext

Result = TypeVar("Result")
_AWS = "https://s3.amazonaws.com"
_WRITTEN = frozenset({200, 201, 204})


class S3Store(Store):
    """Objects under `prefix` of `bucket`; thread-safe; not to be used across a fork."""

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        addressing: str = "auto",
        encryption: Encryption | None = None,
        max_idle_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """`addressing`: bucket in the path (path), in the host name (virtual), or by endpoint (auto)."""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        endpoint = (
            endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or _AWS
        )
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        parts = checked_endpoint(endpoint)
        self._endpoint = f"{parts.scheme}://{parts.netloc}"
        self._connections = Connections(max_idle_s)
        self._credentials = StandardProvider(http=self._connections, region=region)
        if region is None and not (parts.hostname or "").endswith("amazonaws.com"):
            region = "us-east-1"
        try:
            self._client = Minio(
                parts.netloc,
                secure=parts.scheme == "https",
                region=region,
                http_client=self._connections,
                credentials=self._credentials,
            )
        except ValueError as error:
            raise translated(error, where=f"{self.url} at {self._endpoint}") from error
        self._encryption = encryption
        self._address(addressing, parts)
        warn_if_plaintext(self._endpoint)
        proxy_of(self._endpoint)

    def _address(self, addressing: str, endpoint: SplitResult) -> None:
        if addressing == "path":
            self._client.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
        elif addressing == "virtual":
            host = endpoint.hostname or ""
            why = ""
            if ":" in host or host.replace(".", "").isdigit():
                why = f"the endpoint {host} is an IP address, which has no subdomains"
            elif "." in self._bucket and endpoint.scheme == "https":
                why = f"no wildcard certificate covers the dots in the bucket name {self._bucket}"
            if why:
                raise RequestRefused(
                    f"virtual addressing is not possible: {why}", where=self.url, remedy="use addressing=path"
                )
            self._client.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call]

    def put(self, key: str, data: Buffer) -> None:
        self._attempt(key, lambda: self._put(key, memoryview(data).cast("B"), create_only=False))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._attempt(key, lambda: self._put(key, memoryview(data).cast("B"), create_only=True))

    def _put(self, key: str, data: memoryview, *, create_only: bool) -> None:
        url, headers = self._signed_put(key, data)
        if create_only:
            headers["If-None-Match"] = "*"
        body = slices(data, f"{self.url}/{key}") if len(data) else b""
        response = self._connections.urlopen("PUT", url, body=body, headers=headers, preload_content=False)
        try:
            text = response.read(cache_content=True)
        finally:
            response.release_conn()
        if response.status in _WRITTEN:
            if self._encryption is not None:
                self._encryption.check(response.headers, where=f"{self.url}/{key}")
            if "ETag" not in response.headers:  # for example a proxy's page: nothing was stored
                raise StoreUnavailable("the endpoint is not an object store", where=f"{self.url}/{key}")
            return
        if b"<Error>" in text:
            raise S3Error.fromxml(response)
        raise refused("", response.reason or "", response.status, where=f"{self.url}/{key}")

    def _signed_put(self, key: str, data: memoryview) -> tuple[str, dict[str, str]]:
        """Return URL and headers of a PUT with signed x-amz-* headers and an unsigned payload."""
        # minio-py's public way to get the address and region it would use; the query, itself a signature, is dropped.
        presigned = urlsplit(self._client.get_presigned_url("PUT", self._bucket, self._name(key)))
        region = parse_qs(presigned.query)["X-Amz-Credential"][0].split("/")[-3]
        url = presigned._replace(query="")
        credentials = self._credentials.retrieve()
        date = utcnow()
        signed = {
            "Host": url.netloc,
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
            "x-amz-date": to_amz_date(date),
            "x-amz-checksum-crc32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode(),
        }
        if self._encryption is not None:
            signed |= self._encryption.headers()
        if credentials.session_token:
            signed["X-Amz-Security-Token"] = credentials.session_token
        headers = sign_v4_s3(
            method="PUT",
            url=url,
            region=region,
            headers=dict(signed),
            credentials=credentials,
            content_sha256="UNSIGNED-PAYLOAD",
            date=date,
        )
        plain = {name: value for name, value in headers.items() if isinstance(value, str)}
        return urlunsplit(url), plain | {
            "Content-Length": str(len(data)),
            "Content-Type": "application/octet-stream",
        }

    def get(self, key: str) -> bytes:
        return self._attempt(key, lambda: self._get(key))

    def _get(self, key: str) -> bytes:
        response = self._client.get_object(self._bucket, self._name(key))
        try:
            size_bytes = int(response.headers.get("Content-Length", "-1"))
            if size_bytes < 0:
                raise StoreUnavailable("the store's answer has no length", where=f"{self.url}/{key}")
            check_size(size_bytes, where=f"{self.url}/{key}")
            out = bytearray(size_bytes)
            view = memoryview(out)
            done = self._receive(response, view)
        finally:
            _release(response)
        if done < size_bytes:
            self._resume(key, 0, view, done, response.headers.get("ETag"))
        return bytes(out)

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if len(view) == 0:
            if self.head(key).size_bytes < offset:
                raise CorruptObject(f"object ends before offset {offset}", where=f"{self.url}/{key}")
            return
        self._attempt(key, lambda: self._resume(key, offset, view, 0, None))

    def _resume(self, key: str, offset: int, view: memoryview, done: int, etag: str | None) -> None:
        """Fill view[done:] by range requests, each continuing where the last broke off, while they make progress."""
        where = f"{self.url}/{key}"
        while done < len(view):
            left = len(view) - done
            headers: dict[str, str | list[str] | tuple[str]] = {"If-Match": etag} if etag else {}
            try:
                response = self._client.get_object(
                    self._bucket, self._name(key), offset=offset + done, length=left, request_headers=headers
                )
            except S3Error as error:
                if error.code == "InvalidRange":
                    raise CorruptObject(f"object ends before offset {offset + done}", where=where) from error
                if error.code == "PreconditionFailed":
                    raise StoreUnavailable("object was replaced while it was read", where=where) from error
                raise
            try:
                ends_at = _range_end(response, offset + done, where)
                received = self._receive(response, view[done : done + max(0, ends_at - offset - done)])
            finally:
                _release(response)
            etag = etag or response.headers.get("ETag")
            done += received
            if offset + done >= ends_at and done < len(view):
                raise CorruptObject(f"object ends {len(view) - done} bytes early", where=where)
            if received == 0:
                raise StoreUnavailable("answer truncated, and again without a byte", where=where)

    def _receive(self, response: BaseHTTPResponse, view: memoryview) -> int:
        """Return the bytes received into `view`: all, or up to where the connection broke."""
        done = 0
        while done < len(view):
            check_deadline(self.url)
            try:
                some = response.read1(min(SLICE_BYTES, len(view) - done), decode_content=False)
            except (HTTPError, OSError):
                break  # the caller continues by range
            if not some:
                break
            view[done : done + len(some)] = some
            done += len(some)
        return done

    def head(self, key: str) -> ObjectInfo:
        """`modified_at_s` is in whole seconds: Last-Modified has no more."""

        def attempt() -> ObjectInfo:
            try:
                found = self._client.stat_object(self._bucket, self._name(key))
            except S3Error as error:
                # A HEAD response has no body, so a missing bucket looks like a missing object.
                if error.code == "NoSuchKey" and not self._client.bucket_exists(self._bucket):
                    raise self._bucket_missing() from error
                raise
            return ObjectInfo(
                key=key, size_bytes=found.size or 0, modified_at_s=_seconds(found.last_modified)
            )

        return self._attempt(key, attempt)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        # A page repeated with renewed credentials comes from a new listing that starts after the last key.
        listing = ResumedListing(lambda last: self._pages(prefix, last), start_after)
        while (found := self._attempt(prefix, listing.step, is_key=False)) is not None:
            yield found

    def _pages(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        for found in self._client.list_objects(
            self._bucket,
            prefix=self._prefix + prefix,
            recursive=True,
            start_after=self._prefix + start_after if start_after else None,
        ):
            yield ObjectInfo(
                key=(found.object_name or "")[len(self._prefix) :],
                size_bytes=found.size or 0,
                modified_at_s=_seconds(found.last_modified),
            )

    def delete(self, keys: Iterable[str]) -> None:
        objects = [DeleteObject(self._name(key)) for key in keys]
        self._attempt("", lambda: self._delete(objects), is_key=False)

    def _delete(self, objects: list[DeleteObject]) -> None:  # type: ignore[valid-type]
        for error in self._client.remove_objects(self._bucket, objects):
            name = (error.name or "")[len(self._prefix) :]
            failure = refused(error.code or "", error.message or "", 0, where=f"{self.url}/{name}")
            if not isinstance(failure, ObjectNotFound):
                raise failure

    def now_s(self) -> float:
        """Return the Date of a response, in whole seconds; see `Store.now_s`.

        A rejection counts, too: keys with access to one prefix may not access the bucket itself.
        """

        def attempt() -> float:
            try:
                if not self._client.bucket_exists(self._bucket):
                    raise self._bucket_missing()
            except S3Error as error:
                skew_s = self._connections.skew_s
                if error.code != "AccessDenied" or skew_s is None or abs(skew_s) > LARGEST_SKEW_S:
                    raise
            date_s = self._connections.date_s
            if date_s is None:
                raise RequestRefused("the store's answers have no Date", where=self.url)
            return date_s

        return self._attempt("", attempt, is_key=False)

    def close(self) -> None:
        self._connections.clear()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _bucket_missing(self) -> BucketMissing:
        return BucketMissing(
            f"NoSuchBucket: bucket {self._bucket!r} does not exist at {self._endpoint}",
            where=self.url,
            remedy="create the bucket, or correct the store URL",
        )

    def _attempt(self, key: str, attempt: Callable[[], Result], *, is_key: bool = True) -> Result:
        """Make one attempt with translated errors; expired credentials are fetched again once."""
        if is_key:
            check_key(key)
        for renewed in (False, True):
            try:
                return attempt()
            except DeltashardError:
                raise
            except Exception as error:
                if isinstance(error, S3Error) and error.code in EXPIRED and not renewed:
                    self._credentials.forget()
                    continue
                raise translated(
                    error,
                    where=f"{self.url}/{key} at {self._endpoint}",
                    via_proxy=via_proxy(self._endpoint),
                    skew_s=self._connections.skew_s,
                    source=self._credentials.source(),
                ) from error
        raise AssertionError


def _range_end(response: BaseHTTPResponse, start: int, where: str) -> int:
    """Return the end, within the object, of the response to a range request from `start`."""
    length = int(response.headers.get("Content-Length", "-1"))
    content_range = response.headers.get("Content-Range", "")
    if (
        length < 0
        or (response.status != 206 and start > 0)
        or (content_range and not content_range.startswith(f"bytes {start}-"))
    ):
        raise StoreUnavailable("the store (or a proxy before it) ignored the range of a read", where=where)
    return start + length


def _release(response: BaseHTTPResponse) -> None:
    """Return the connection to the pool if its response was read completely, else close it."""
    if response.length_remaining == 0:
        response.drain_conn()
    else:
        response.close()
    response.release_conn()


def _seconds(moment: datetime | None) -> float:
    return (moment or datetime.fromtimestamp(0, UTC)).timestamp()
