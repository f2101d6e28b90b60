"""List and watch of objects of several kinds by kopf, in all or some namespaces.

kopf lists in pages, watches, resumes ended watches, ends silent ones and retries failures. It writes nothing. Its
`continuous_watch` ends when changes may have been missed (410 Gone, an error in the stream); then the path is listed
again, and objects missing from the list are reported as deleted. The server filters by label. All callbacks run on the
caller's loop, for each kind in the API's order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import kopf
import structlog
from deltashard_checkpoint.errors import EnvironmentFault
from kopf._cogs.clients import auth, watching
from kopf._cogs.structs.credentials import KubeContext, Vault, VaultKey
from kopf._cogs.structs.references import NamespaceName, Resource

from deltashard_operator.kube.api_access import ApiAccess

SERVER_S = 240  # the server ends a watch after this time, and kopf resumes it
INACTIVITY_S = 75  # bookmarks arrive every minute, so a watch silent for longer is dead
STALE_S = 240.0  # a watch without events for this time is stale
CHUNK = 500
PAUSE_S = 2.0  # before another list
BACKOFFS_S = (1.0, 2.0, 5.0, *(10.0,) * 60)
"""Delays between retries of a failed request. After the last one the path is listed again."""
Document = dict[str, Any]
_log = structlog.get_logger("deltashard.watch")


class ObjectKey(NamedTuple):
    """Key of an object."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class WatchedKind:
    """Kind of watched objects, and its callbacks."""

    name: str
    path: str
    """URL path of the collection, such as /apis/batch/v1/jobs."""
    on_object: Callable[[Document], None]
    on_deleted: Callable[[ObjectKey, Document | None], None]
    """Called once for a deleted known object, with its last state, or None if the deletion was missed."""
    selector: str = ""
    namespaced: bool = True
    everywhere: bool = False
    """Watch only if all namespaces are watched: with a list of namespaces the rights to read the kind are missing."""

    @property
    def resource(self) -> Resource:
        *root, version, plural = self.path.split("/")[1:]
        return Resource("".join(root[1:]), version, plural, namespaced=self.namespaced)


class WatchStalled(EnvironmentFault):
    """A watch has had no event and no request for a long time; a restart of the process is required."""


class _Vault(Vault):
    """Permanent credentials. kopf's request to discard them ends one watch, because no login handler exists."""

    async def invalidate(self, key: VaultKey, info: KubeContext, *, exc: Exception | None = None) -> None:  # noqa: ARG002
        raise exc or aiohttp.ClientConnectionError("kopf requested a new login")


class ObjectWatch:
    """Watches several kinds. `run` it as a task."""

    def __init__(
        self,
        api: ApiAccess,
        kinds: Sequence[WatchedKind],
        *,
        on_list: Callable[[], None],
        namespaces: Sequence[str] = (),
        count: Callable[[str, str], None] = lambda _outcome, _kind: None,
    ) -> None:
        """Watch these kinds in these namespaces, or in all if empty.

        `on_list` is called after a list once every kind has been listed in every namespace; `count` with the outcome
        (handled, handler_failed, failed) and the kind.
        """
        self._api = api
        self._on_list = on_list
        self._count = count
        self._watched_paths: dict[str, tuple[WatchedKind, NamespaceName | None]] = {
            kind.resource.get_url(namespace=namespace): (kind, namespace)
            for kind in kinds
            if not (namespaces and kind.everywhere)
            for namespace in (map(NamespaceName, namespaces) if namespaces and kind.namespaced else (None,))
        }
        """URL path -> watched kind and namespace."""
        self._known: dict[str, dict[tuple[str, str], str]] = {path: {} for path in self._watched_paths}
        """Path -> (namespace, name) -> UID of known objects."""
        self._unlisted = set(self._watched_paths)
        self._refused: set[str] = set()
        """Paths that the API denied in the newest response."""
        self._last_event_s = dict.fromkeys(self._watched_paths, time.monotonic())
        self._last_request_s = self._last_event_s.copy()

    def staleness_s(self) -> float:
        """Return the seconds since the stalest watch received anything. Denied paths are ignored unless all are."""
        readable = self._watched_paths.keys() - self._refused
        return time.monotonic() - min(self._last_event_s[path] for path in readable or self._watched_paths)

    async def run(self) -> None:
        """Watch forever. Raises an exception group with `WatchStalled`."""
        self._last_event_s = dict.fromkeys(self._watched_paths, time.monotonic())
        self._last_request_s = self._last_event_s.copy()
        session = self._api.session(self._track_request)
        known = kopf.AiohttpSession(server=self._api.configuration.host, aiohttp_session=session)
        async with session, asyncio.TaskGroup() as group:
            auth.vault_var.set(_Vault({"api": known}))
            for path in self._watched_paths:
                group.create_task(self._watch_path(path))
            while not (stalled_path := self._stalled_path()):  # noqa: ASYNC110 - the absence of events triggers no event
                await asyncio.sleep(PAUSE_S)
            raise WatchStalled("no event and no request for a long time", where=stalled_path)

    def _stalled_path(self) -> str:
        """Return a path without events and requests, or an empty string. While the API is down, requests continue."""
        least_s = time.monotonic() - 2 * STALE_S
        return next(
            (
                each
                for each in self._watched_paths
                if self._last_event_s[each] < least_s > self._last_request_s[each]
            ),
            "",
        )

    async def _track_request(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        path = request.url.path
        self._last_request_s[path] = time.monotonic()
        response = await handler(request)
        if response.status == 401:  # kopf would wait for a login handler
            response.close()
            raise aiohttp.ClientConnectionError("the API rejected the token (401)")
        if response.status < 400:
            self._last_event_s[path] = time.monotonic()
            self._refused.discard(path)
        elif response.status == 403 and self._watched_paths[path][1]:
            self._mark_refused(path)
        return response

    async def _watch_path(self, path: str) -> None:
        kind, namespace = self._watched_paths[path]
        settings = _settings(kind)
        while True:
            listed: set[ObjectKey] = set()
            try:
                async for event in watching.continuous_watch(
                    settings=settings,
                    resource=kind.resource,
                    namespace=namespace,
                    operator_pause_waiter=asyncio.get_running_loop().create_future(),
                ):
                    self._last_event_s[path] = time.monotonic()
                    if isinstance(event, watching.Bookmark):
                        self._finish_list(path, listed)
                        listed.clear()
                    elif event["type"] == "DELETED":
                        self._remove(path, _key_of(event["object"]), event["object"])
                    elif event["type"] != "BOOKMARK":
                        key = self._upsert(path, event["object"])
                        if event["type"] is None:  # of the list
                            listed.add(key)
            except Exception as error:  # noqa: BLE001 - a failed watch is restarted
                _log.warning("watch.failed", path=path, error=f"{type(error).__name__}: {error}"[:300])
                self._count("failed", kind.name)
            await asyncio.sleep(PAUSE_S)

    def _mark_refused(self, path: str) -> None:
        """Continue without this path, keeping its known objects: a namespace being deleted loses its rights first."""
        if path not in self._refused:
            _log.warning("watch.refused", path=path)
            self._refused.add(path)
            self._notify_listed()

    def _finish_list(self, path: str, listed: set[ObjectKey]) -> None:
        for key in [ObjectKey(*name, uid) for name, uid in self._known[path].items()]:
            if key not in listed:
                self._remove(path, key, None)
        self._unlisted.discard(path)
        self._notify_listed()

    def _notify_listed(self) -> None:
        if self._unlisted <= self._refused and self._unlisted != self._watched_paths.keys():
            self._on_list()

    def _upsert(self, path: str, document: Any) -> ObjectKey:
        key, known = _key_of(document), self._known[path]
        before = known.get(key[:2], key.uid)
        if before != key.uid:  # the deletion was missed, and the name was reused
            self._remove(path, key._replace(uid=before), None)
        known[key[:2]] = key.uid
        self._notify(path, self._watched_paths[path][0].on_object, document)
        return key

    def _remove(self, path: str, key: ObjectKey, last: Any) -> None:
        if self._known[path].get(key[:2]) == key.uid:
            del self._known[path][key[:2]]
            self._notify(path, self._watched_paths[path][0].on_deleted, key, last)

    def _notify(self, path: str, callback: Callable[..., None], *of: Any) -> None:
        kind, outcome = self._watched_paths[path][0].name, "handled"
        try:
            callback(*of)
        except Exception:  # noqa: BLE001 - one invalid object must not stop the others
            outcome = "handler_failed"
            _log.exception("watch.handler_failed", kind=kind)
        self._count(outcome, kind)


def _key_of(document: Any) -> ObjectKey:
    metadata = document["metadata"]
    return ObjectKey(metadata.get("namespace", ""), metadata["name"], metadata["uid"])


def _settings(kind: WatchedKind) -> kopf.OperatorSettings:
    found = kopf.OperatorSettings()
    found.watching.server_timeout = SERVER_S
    found.watching.inactivity_timeout = INACTIVITY_S
    found.watching.chunk_size = CHUNK
    if kind.selector:
        found.watching.label_selectors[kopf.EVERYTHING] = kind.selector
    found.networking.request_timeout = 60
    found.networking.connect_timeout = 10
    found.networking.error_backoffs = BACKOFFS_S
    return found
