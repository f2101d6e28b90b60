"""A store in a bucket of Google Cloud Storage or a container of Azure Blob Storage, through obstore.

**Create-only is the client's mode `create`**: `x-goog-if-generation-match: 0` with Google, `If-None-Match: *` with
Azure. Reads stream into the caller's buffer; a read that breaks off continues by range, pinned to the same ETag.
Uploads send the caller's memory and return only when the client has released it.

Neither service receives a checksum: TLS protects the bytes in transit. Over plain http they are unprotected until a
restore checks a frame's hash, so the store warns once about an endpoint that is neither TLS nor on this machine.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import certifi

from deltashard_checkpoint.errors import CorruptObject, DeltashardError
from deltashard_checkpoint.stores.abc import (
    AccessDenied,
    BucketMissing,
    Buffer,
    ObjectInfo,
    ObjectNotFound,
    RequestRefused,
    Store,
    StoreUnavailable,
    check_size,
)
from deltashard_checkpoint.stores.cloud.account import Account
from deltashard_checkpoint.stores.cloud.event_loop_thread import EventLoopThread, wait_released, with_timeout
from deltashard_checkpoint.stores.deadline import IDLE_TIMEOUT_S, remaining_s
from deltashard_checkpoint.stores.key_rule import check_key, check_prefix
from deltashard_checkpoint.stores.transport import (
    ca_bundle,
    certificate_refused,
    proxy_of,
    via_proxy,
    warn_if_plaintext,
)

if TYPE_CHECKING:
    from obstore import GetResult, ListStream, ObjectMeta

Result = TypeVar("Result")
CHUNK_BYTES = 256 * 1024
"""Chunk size of a read; a chunk that breaks off is requested again."""
PAGE = 1000
SLOWEST_BYTES_PER_S = 2.0 * 1024 * 1024
"""Uploads report no progress: one that is slower than this is abandoned and retried."""
_DELETES = 16
"""Concurrent deletions: unlike S3, neither service deletes many objects per request."""


class CloudStore(Store):
    """Objects under `prefix` of `account`'s bucket; thread-safe; not to be used across a fork."""

    def __init__(
        self, account: Account, *, url: str, prefix: str = "", max_idle_s: float = IDLE_TIMEOUT_S
    ) -> None:
        self.url = url
        self._account = account
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._max_idle_s = max_idle_s
        self._loop_thread = EventLoopThread(url)
        if account.endpoint:
            warn_if_plaintext(account.endpoint)
            proxy_of(account.endpoint)

    def put(self, key: str, data: Buffer) -> None:
        self._attempt(key, lambda: self._put(key, data, create_only=False), writes=True)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._attempt(key, lambda: self._put(key, data, create_only=True), writes=True)

    async def _put(self, key: str, data: Buffer, *, create_only: bool) -> None:
        import obstore

        where = f"{self.url}/{key}"
        view = memoryview(data).cast("B") if memoryview(data) else memoryview(b"")
        longest_s = self._max_idle_s + len(view) / SLOWEST_BYTES_PER_S
        try:
            sending = obstore.put_async(
                self._account.client(),
                self._name(key),
                view,
                mode="create" if create_only else "overwrite",
                use_multipart=False,
            )
            await with_timeout(sending, longest_s, "the store went silent", where)
        finally:
            await wait_released(view, where)

    def get(self, key: str) -> bytes:
        return self._attempt(key, lambda: self._get(key))

    async def _get(self, key: str) -> bytes:
        where = f"{self.url}/{key}"
        answer = await self._request(key, None)
        size_bytes = answer.meta["size"]
        check_size(size_bytes, where=where)
        out = bytearray(size_bytes)
        done = await self._receive(answer, memoryview(out), 0, where)
        if done < size_bytes:
            await self._resume(key, 0, memoryview(out), done, answer.meta["e_tag"])
        return bytes(out)

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if len(view) == 0:
            if self.head(key).size_bytes < offset:
                raise CorruptObject(f"object ends before offset {offset}", where=f"{self.url}/{key}")
            return
        self._attempt(key, lambda: self._resume(key, offset, view, 0, None))

    async def _resume(self, key: str, offset: int, view: memoryview, done: int, etag: str | None) -> None:
        """Fill view[done:] by range requests, each continuing where the last broke off, while they make progress."""
        where = f"{self.url}/{key}"
        while done < len(view):
            first = offset + done
            try:
                answer = await self._request(key, (first, offset + len(view)))
            except Exception as error:
                from deltashard_checkpoint.stores.cloud.error_code import out_of_range

                if out_of_range(error):
                    raise CorruptObject(f"object ends before offset {first}", where=where) from error
                raise
            found = answer.meta
            if etag is not None and found["e_tag"] != etag:
                raise StoreUnavailable("object was replaced while it was read", where=where)
            if answer.range[0] != first:
                raise StoreUnavailable(
                    "the store (or a proxy before it) ignored the range of a read", where=where
                )
            if found["size"] < offset + len(view):
                raise CorruptObject(
                    f"object ends {offset + len(view) - found['size']} bytes early", where=where
                )
            etag = found["e_tag"]
            received = await self._receive(answer, view, done, where)
            if received == done:
                raise StoreUnavailable("answer truncated, and again without a byte", where=where)
            done = received

    async def _request(self, key: str, span: tuple[int, int] | None) -> GetResult:
        import obstore

        asking = obstore.get_async(
            self._account.client(), self._name(key), options={"range": span} if span else {}
        )
        return await with_timeout(asking, self._max_idle_s, "the store went silent", f"{self.url}/{key}")

    async def _receive(self, answer: GetResult, view: memoryview, done: int, where: str) -> int:
        """Return how far `view` is filled: to its end, or to where the connection broke."""
        stream = answer.stream(CHUNK_BYTES)
        while done < len(view):
            try:
                some = await with_timeout(anext(stream), self._max_idle_s, "the store went silent", where)
            except StopAsyncIteration:
                break
            except DeltashardError:
                raise
            except Exception:  # noqa: BLE001 - the caller continues by range and raises persistent errors
                break
            chunk = memoryview(some)
            if len(chunk) > len(view) - done:
                raise StoreUnavailable("the store sent more than was asked for", where=where)
            view[done : done + len(chunk)] = chunk
            done += len(chunk)
        return done

    def head(self, key: str) -> ObjectInfo:
        """`modified_at_s` is in whole seconds: Last-Modified has no more."""
        try:
            return self._attempt(key, lambda: self._head(key))
        except ObjectNotFound:
            # A HEAD response has no body, so a missing bucket looks like a missing object.
            next(self._pages("no-such-object/", ""), None)
            raise

    async def _head(self, key: str) -> ObjectInfo:
        import obstore

        asking = obstore.head_async(self._account.client(), self._name(key))
        found = await with_timeout(asking, self._max_idle_s, "the store went silent", f"{self.url}/{key}")
        return self._info(found)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._listed(prefix, start_after)

    def _listed(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        last = ""
        pages = self._pages(prefix, start_after)
        first = next(pages, None)
        if first is None:
            self._check_is_store()
            return
        for found in chain([first], pages):
            if found.key <= last:
                raise RequestRefused(
                    f"the store does not list objects in key order: {found.key!r} after {last!r}",
                    where=self.url,
                    remedy="use a storage account without hierarchical namespace",
                )
            last = found.key
            if found.key > start_after and found.key.startswith(prefix):
                yield found
            elif found.key[: len(prefix)] > prefix:
                return

    def _check_is_store(self) -> None:
        """Raise `StoreUnavailable` if a server answers every request, whose page obstore reads as an empty listing."""
        name = f"no-such-object-{secrets.token_hex(8)}"
        try:
            self._attempt(name, lambda: self._head(name))
        except ObjectNotFound:
            return
        raise StoreUnavailable(
            "the endpoint is not an object store: it returns an object that was never created",
            where=f"{self.url} at {self._account.endpoint}{via_proxy(self._account.endpoint)}",
            remedy="check for a proxy that answers every request",
        )

    def _pages(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield objects of the folder of `prefix`: obstore lists whole folders."""
        import obstore

        folder = (self._prefix + prefix).rpartition("/")[0]
        after = self._prefix + start_after if start_after else None
        stream: ListStream[Any] | None = None

        async def page() -> Sequence[ObjectMeta]:
            nonlocal stream
            if stream is None:
                stream = obstore.list(self._account.client(), folder or None, offset=after, chunk_size=PAGE)
            try:
                return await with_timeout(anext(stream), self._max_idle_s, "the store went silent", self.url)
            except StopAsyncIteration:
                return []

        while found := self._attempt(prefix, page, is_key=False):
            for each in found:
                yield self._info(each)

    def delete(self, keys: Iterable[str]) -> None:
        left = iter(keys)
        while some := [self._name(key) for key in islice(left, _DELETES)]:
            self._attempt("", lambda some=some: self._delete(some), is_key=False)  # type: ignore[misc]

    async def _delete(self, names: Sequence[str]) -> None:
        import obstore

        client = self._account.client()

        async def one(name: str) -> None:
            asking = obstore.delete_async(client, name)
            try:
                await with_timeout(asking, self._max_idle_s, "the store went silent", self.url)
            except FileNotFoundError as error:
                if isinstance(self._translated(error, self.url), BucketMissing):
                    raise

        results = await asyncio.gather(*(one(name) for name in names), return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException):
                raise each

    def now_s(self) -> float:
        """Return the Date of an unauthenticated response, in whole seconds."""
        endpoint = self._account.endpoint
        if not endpoint:
            self._account.client()  # raises for missing credentials
            endpoint = self._account.endpoint
        context = ssl.create_default_context(cafile=certifi.where())
        if (bundle := ca_bundle()) is not None:  # in addition to the public ones, as in the client
            context.load_verify_locations(bundle[1])
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        try:
            with opener.open(
                endpoint + "/", timeout=max(0.01, min(self._max_idle_s, remaining_s()))
            ) as answer:
                date = answer.headers.get("Date")
        except urllib.error.HTTPError as error:
            with error:
                date = error.headers.get("Date")
        except OSError as error:
            reason = getattr(error, "reason", error)
            where = f"{self.url} at {endpoint}{via_proxy(endpoint)}"
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise certificate_refused(reason.verify_message, where=where) from None
            raise StoreUnavailable(f"no connection: {reason}", where=where) from error
        if date is None:
            raise RequestRefused("the store's answers have no Date", where=self.url)
        return parsedate_to_datetime(date).timestamp()

    def close(self) -> None:
        self._loop_thread.close()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _info(self, found: ObjectMeta) -> ObjectInfo:
        return ObjectInfo(
            key=found["path"][len(self._prefix) :],
            size_bytes=found["size"],
            modified_at_s=found["last_modified"].timestamp(),
        )

    def _attempt(
        self,
        key: str,
        work: Callable[[], Coroutine[Any, Any, Result]],
        *,
        is_key: bool = True,
        writes: bool = False,
    ) -> Result:
        if is_key:
            check_key(key)
        if remaining_s() <= 0:
            raise StoreUnavailable("the call's deadline passed", where=f"{self.url}/{key}")
        try:
            return self._loop_thread.run(work)
        except DeltashardError:
            raise
        except Exception as error:
            named = self._translated(error, f"{self.url}/{key}", writes=writes)
            if isinstance(named, AccessDenied):
                self._account.forget()  # a token that was valid an hour ago may have expired
            raise named from error

    def _translated(self, error: Exception, where: str, *, writes: bool = False) -> DeltashardError:
        from deltashard_checkpoint.stores.cloud.error_code import translated

        endpoint = self._account.endpoint
        return translated(
            error,
            where=f"{where} at {endpoint}",
            via_proxy=via_proxy(endpoint),
            source=self._account.source(),
            credentials_hint=self._account.credentials_hint,
            configured=self._account.configured(),
            writes=writes,
        )
