"""Objects of a few kinds, listed and watched by kopf, everywhere or in some namespaces.

kopf lists in pages, watches, goes on where a watch ended, ends one that is silent and tries again what fails. It writes
nothing. Its `continuous_watch` ends where changes may have been missed (410 Gone, an error in the stream): then another
list begins, and what it does not name is gone. Objects are chosen by the server, by label. All runs on the caller's
loop, and what happens to objects of one kind is told in the API's order.
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

SERVER_S = 240  # the server ends a watch after so long, and kopf goes on from where it was
INACTIVITY_S = 75  # bookmarks come every minute: a watch without a byte for longer is dead
STALE_S = 240.0  # a watch that brought nothing for so long is not heard
CHUNK = 500
PAUSE_S = 2.0  # before another list
BACKOFFS_S = (1.0, 2.0, 5.0, *(10.0,) * 60)
"""Before another try of a request that failed; after the last one there is another list."""
Document = dict[str, Any]
_log = structlog.get_logger("deltashard.watch")


class ObjectKey(NamedTuple):
    """Which object."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class WatchedKind:
    """One kind of objects, and who is told of them."""

    name: str
    """For metrics and logs."""
    path: str
    """URL path of all of them, such as /apis/batch/v1/jobs."""
    on_object: Callable[[Document], None]
    """Called with an object that is there, or changed."""
    on_deleted: Callable[[ObjectKey, Document | None], None]
    """Called once when one that was told of is gone, with its last state, or with None when it went unseen."""
    selector: str = ""
    """Labels that the server chooses by."""
    namespaced: bool = True
    """Whether they lie in namespaces; nodes do not."""
    everywhere: bool = False
    """Whether they are watched only where all namespaces are: who is given some has no right to read them."""

    @property
    def resource(self) -> Resource:
        *root, version, plural = self.path.split("/")[1:]
        return Resource("".join(root[1:]), version, plural, namespaced=self.namespaced)


class WatchStalled(EnvironmentFault):
    """Something was neither heard nor asked for: a fresh process watches again."""


class _Vault(Vault):
    """Credentials that stay: nobody answers kopf's logins. What it would discard them for ends one watch."""

    async def invalidate(self, key: VaultKey, info: KubeContext, *, exc: Exception | None = None) -> None:  # noqa: ARG002
        raise exc or aiohttp.ClientConnectionError("kopf wants another login")


class ObjectWatch:
    """Watches kinds. `run` it as a task."""

    def __init__(
        self,
        api: ApiAccess,
        kinds: Sequence[WatchedKind],
        *,
        on_list: Callable[[], None],
        namespaces: Sequence[str] = (),
        count: Callable[[str, str], None] = lambda _outcome, _kind: None,
    ) -> None:
        """Watch these kinds in these namespaces; none named: everywhere.

        `on_list` is called after a list when every kind was listed, in every namespace; `count` with the outcome (handled,
        handler_failed, failed) and the kind.
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
        """URL path -> what is watched there."""
        self._known: dict[str, dict[tuple[str, str], str]] = {path: {} for path in self._watched_paths}
        """Path -> namespace and name -> UID of what is there."""
        self._unlisted = set(self._watched_paths)
        self._refused: set[str] = set()
        """Paths that may not be read, by the API's newest word."""
        self._last_event_s = dict.fromkeys(self._watched_paths, time.monotonic())
        self._last_request_s = self._last_event_s.copy()

    def staleness_s(self) -> float:
        """Seconds since the least fresh watch brought anything, a bookmark too.

        One that may not be read (a namespace of several whose rights went) does not count, unless none may.
        """
        readable = self._watched_paths.keys() - self._refused
        return time.monotonic() - min(self._last_event_s[path] for path in readable or self._watched_paths)

    async def run(self) -> None:
        """Watch for ever; raises a group with `WatchStalled`."""
        self._last_event_s = dict.fromkeys(self._watched_paths, time.monotonic())
        self._last_request_s = self._last_event_s.copy()
        session = self._api.session(self._track_request)
        known = kopf.AiohttpSession(server=self._api.configuration.host, aiohttp_session=session)
        async with session, asyncio.TaskGroup() as group:
            auth.vault_var.set(_Vault({"api": known}))
            for path in self._watched_paths:
                group.create_task(self._watch_path(path))
            while not (stalled_path := self._stalled_path()):  # noqa: ASYNC110 - of what does not happen there is no event
                await asyncio.sleep(PAUSE_S)
            raise WatchStalled("it was neither heard nor asked for, for long", where=stalled_path)

    def _stalled_path(self) -> str:
        """A path that nobody cares for any more; empty: there is none. An API that is away is asked all the time."""
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
        if response.status == 401:  # of which kopf would make a login that nobody answers
            response.close()
            raise aiohttp.ClientConnectionError("the API does not know the token")
        if response.status < 400:
            self._last_event_s[path] = time.monotonic()
            self._refused.discard(path)
        elif response.status == 403 and self._watched_paths[path][1]:
            self._mark_refused(path)
        return response

    async def _watch_path(self, path: str) -> None:
        """List and watch one path, for ever."""
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
            except Exception as error:  # noqa: BLE001 - whatever ends a watch: it begins anew
                _log.warning("watch.failed", path=path, error=f"{type(error).__name__}: {error}"[:300])
                self._count("failed", kind.name)
            await asyncio.sleep(PAUSE_S)

    def _mark_refused(self, path: str) -> None:
        """Go on without this path: its namespace may be going, rights first. What is known of it stays."""
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
        if before != key.uid:  # it went unseen, and another was made under its name
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
        except Exception:  # noqa: BLE001 - one odd object must not stop the others
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
