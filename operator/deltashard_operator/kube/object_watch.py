"""Objects of a few kinds, watched by kopf, everywhere or in some namespaces: what is there, what changes, what went.

kopf lists and watches, goes on where a watch ended, lists again when that is too long ago (410 Gone), ends watches that
are silent and tries what fails for ever. Its `on.event` alone is used, which writes nothing: no finalizers, annotations
or progress. Objects are chosen by the server, by label; nothing else of the cluster's reaches this process. kopf has no
limit of workers: with one below the number of objects it can wait for ever at its start.

Whoever watches a kind is told on its own asyncio loop: of each object that a list names, of what is gone by that list,
then of each change. A list comes again only when changes may have been missed. kopf keeps the order of what happens to
one UID, and no other: of two that bear one name after each other, the second may be heard of first.

kopf runs in a thread of its own: on a loop it shares it takes the signals for itself and at its end cancels every task
that it did not start. When it ends (an error that it does not try again, a definition that is not there), or leaves a
kind unwatched, it is begun anew.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import kopf
import structlog
from kubernetes import client

from deltashard_operator.kube.watch_session import Document, Freshness, session

SERVER_S = 240
"""The server ends a watch after so long, and kopf goes on from where it was."""
INACTIVITY_S = 75
"""Bookmarks come every minute: a watch without a byte for longer is dead."""
CONNECT_S = 10
REQUEST_S = 60
CHUNK = 500
PAUSES_S = (1.0, 2.0, 5.0, 10.0)
"""Before another try, the last one for ever; half of it is left to chance, so that replicas spread."""
STEADY_S = 60.0
"""kopf that held for so long was well."""
TICK_S = 1.0
END_S = 8.0
"""kopf gets so long to end; its thread holds nothing."""
_log = structlog.get_logger("deltashard.watch")


class ObjectKey(NamedTuple):
    """Which object."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class WatchedKind:
    """One kind of objects, and who is told of them: both are called on the loop that `ObjectWatch.run` runs on."""

    name: str
    """For metrics and logs."""
    path: str
    """URL path of all of them, such as /apis/batch/v1/jobs, or of those of one namespace."""
    on_object: Callable[[Document], None]
    """Called with an object that is there, or changed."""
    on_gone: Callable[[ObjectKey, Document | None], None]
    """Called when one that was told of is gone, once, with its last state, or with None when it went unseen."""
    selector: str = ""
    """Labels that the server chooses by."""
    by_name: bool = False
    """Whether who is told keeps objects by name, not by UID: told neither of the state nor of the end of one whose name
    a newer one bears."""
    namespaced: bool = True
    """Whether they lie in namespaces; nodes do not."""
    everywhere: bool = False
    """Whether they are watched only where all namespaces are: who is given some has no right to read them."""

    def within(self, namespace: str) -> WatchedKind:
        root, _, plural = self.path.rpartition("/")
        return replace(self, path=f"{root}/namespaces/{namespace}/{plural}")

    @property
    def resource(self) -> tuple[str, str, str]:
        """Group, version and plural."""
        *root, version, plural = self.path.split("/")[1:]
        return "".join(root[1:]), version, plural


class ObjectWatch:
    """Watches kinds. `run` it as a task."""

    def __init__(
        self,
        api: client.ApiClient,
        kinds: Sequence[WatchedKind],
        *,
        on_list: Callable[[], None],
        namespaces: Sequence[str] = (),
        count: Callable[[str, str], None] = lambda _what, _kind: None,
    ) -> None:
        """Watch these kinds in these namespaces; none named: everywhere.

        `on_list` is called after a list when every kind was listed, in every namespace; `count` with event, error,
        watch or failure.
        """
        self._api = api
        self._asked = tuple(kind for kind in kinds if not (namespaces and kind.everywhere))
        self._namespaces = tuple(namespaces)
        self._kinds = {
            each.path: each
            for kind in self._asked
            for each in (self._kind_in(kind, namespace) for namespace in self._namespaces or ("",))
        }
        self._count = count
        self._on_list = on_list
        self._known: dict[str, dict[tuple[str, str], dict[str, int]]] = {path: {} for path in self._kinds}
        """What is there, by path, by namespace and name: UID -> version. Two while an end is on its way."""
        self._listing: dict[str, set[ObjectKey]] = {path: set() for path in self._kinds}
        """What the newest list of a path names so far."""
        self._list_version: dict[str, int] = dict.fromkeys(self._known, 0)
        """Of the newest list of a path: it tells all that happened until then, so no event of that time is news."""
        self._listed: set[str] = set()
        self._refused: set[str] = set()
        """Paths that may not be read, by the API's newest word."""
        self.freshness = Freshness(self._kinds)

    def _kind_in(self, kind: WatchedKind, namespace: str) -> WatchedKind:
        """The kind as it is watched for an object of this namespace."""
        return kind.within(namespace) if self._namespaces and kind.namespaced else kind

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        pauses = iter(_Pauses())
        while True:
            begun_s, told = time.monotonic(), threading.Event()
            self.freshness.begin()
            work = asyncio.wrap_future(_in_thread(self._kopf, loop.call_soon_threadsafe, told))
            try:
                while not work.done() and not self.freshness.untended():
                    await asyncio.wait({work}, timeout=TICK_S)
            finally:
                untended = self.freshness.untended()
                told.set()
                await asyncio.wait({work}, timeout=END_S)
            await asyncio.wait({work})  # as long as it does not end, nothing is tended
            self.freshness.begin()  # nor is a pause a reason to end the process
            error = work.exception()
            why = f"{type(error).__name__}: {error}" if error else f"not watched: {', '.join(untended)}"
            _log.warning("watch.failed", error=why[:300])
            self._count("failure", "")
            if time.monotonic() - begun_s > STEADY_S:
                pauses = iter(_Pauses())
            await asyncio.sleep(next(pauses))

    # -- on kopf's thread ---------------------------------------------------------------------------------------------

    async def _kopf(self, hand_on: Callable[..., object], told: threading.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(drop_unclosed)
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return session(
                self._api,
                self._kinds,
                self.freshness,
                on_page=lambda path, page, first: hand_on(self._take_page, self._kinds[path], page, first),
                on_watch=lambda path: self._count("watch", self._kinds[path].name),
                on_refused=lambda path: hand_on(self._take_refusal, path),
            )

        for kind in self._asked:

            async def handle(event: Any, kind: WatchedKind = kind, **_: Any) -> None:
                if event["type"] is not None:  # what a list names came with its page
                    document = event["object"]
                    there = self._kind_in(kind, document["metadata"].get("namespace", ""))
                    hand_on(self._take, there, event["type"], document)

            kopf.on.event(*kind.resource, registry=registry, id=kind.name)(handle)
        try:
            await kopf.operator(
                registry=registry,
                settings=settings(self._asked),
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                standalone=True,
                stop_flag=told,
            )
        finally:
            told.set()  # kopf waits for it in a thread, without which its loop would not end

    # -- on the loop of who is told -----------------------------------------------------------------------------------

    def _take_page(self, kind: WatchedKind, page: Document, first: bool) -> None:
        listed = self._listing[kind.path]
        if first:
            listed.clear()
            self._list_version[kind.path] = _version_of(page)
        for document in page.get("items") or ():
            listed.add(_key_of(document))
            self._take_listed(kind, document)
        if (page.get("metadata") or {}).get("continue"):
            return
        there = [ObjectKey(*name, uid) for name, uids in self._known[kind.path].items() for uid in uids]
        for key in there:
            if key not in listed:
                self._drop(kind, key, None)
        self._listed.add(kind.path)
        self._refused.discard(kind.path)
        if len(self._listed | self._refused) == len(self._kinds):
            self._on_list()

    def _take_refusal(self, path: str) -> None:
        """This path may not be read (any more): what is known of it stays, and nobody waits for it.

        Its namespace may be going, rights first. Where nothing may be read there is nothing to go on with.
        """
        if path not in self._refused:
            _log.warning("watch.refused", path=path)
        self._refused.add(path)
        if self._listed and len(self._listed | self._refused) == len(self._kinds):
            self._on_list()

    def _take_listed(self, kind: WatchedKind, document: Document) -> None:
        key = _key_of(document)
        bearers = self._known[kind.path].setdefault(key[:2], {})
        bearers[key.uid] = _version_of(document)
        for uid in bearers.keys() - {key.uid}:  # it went, and another was made under its name
            self._drop(kind, key._replace(uid=uid), None)
        self._tell(kind, kind.on_object, document)

    def _take(self, kind: WatchedKind, what: str, document: Document) -> None:
        key, version = _key_of(document), _version_of(document)
        known = self._known[kind.path].get(key[:2], {}).get(key.uid)
        if what == "DELETED":
            if known is not None and known <= version:
                self._drop(kind, key, document)
            return
        if version <= max(known or 0, self._list_version[kind.path]):
            return
        bearers = self._known[kind.path].setdefault(key[:2], {})
        bearers[key.uid] = version
        if not kind.by_name or version == max(bearers.values()):
            self._tell(kind, kind.on_object, document)

    def _drop(self, kind: WatchedKind, key: ObjectKey, last: Document | None) -> None:
        bearers = self._known[kind.path][key[:2]]
        newest = bearers.pop(key.uid) > max(bearers.values(), default=-1)
        if not bearers:
            del self._known[kind.path][key[:2]]
        if newest or not kind.by_name:
            self._tell(kind, kind.on_gone, key, last)

    def _tell(self, kind: WatchedKind, told: Callable[..., None], *of: Any) -> None:
        try:
            told(*of)
        except Exception:  # noqa: BLE001 - one odd object must not stop the others
            self._count("error", kind.name)
            _log.exception("watch.event_not_understood", kind=kind.name)
        self._count("event", kind.name)


def _key_of(document: Document) -> ObjectKey:
    metadata = document["metadata"]
    return ObjectKey(metadata.get("namespace", ""), metadata["name"], metadata["uid"])


def _version_of(document: Document) -> int:
    """The resourceVersion of an object or a list: of one kind they grow with every change of any object."""
    return int(document["metadata"]["resourceVersion"])


def _in_thread(work: Callable[..., Coroutine[Any, Any, None]], *of: Any) -> Future[None]:
    """Run a coroutine on a loop and a thread of its own, which does not hold the end of the process."""
    found: Future[None] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            asyncio.run(work(*of))
        except BaseException as error:  # noqa: BLE001 - whoever waits for it is to see it
            found.set_exception(error)
        else:
            found.set_result(None)

    threading.Thread(target=run, name="kopf", daemon=True).start()
    return found


class _Pauses:
    """Pauses between tries, without end."""

    def __iter__(self) -> Iterator[float]:
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311


class _NoEssence(kopf.MultiDiffBaseStorage):
    """Spares a copy of every object (0.8 ms for a pod): no handler asks what changed of it."""

    def build(self, **_: Any) -> Any:
        return {}


def settings(kinds: Sequence[WatchedKind]) -> kopf.OperatorSettings:
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.scanning.disabled = True
    found.watching.server_timeout = SERVER_S
    found.watching.inactivity_timeout = INACTIVITY_S
    found.watching.chunk_size = CHUNK
    for kind in kinds:
        if kind.selector:
            found.watching.label_selectors[kind.resource] = kind.selector
    found.networking.request_timeout = REQUEST_S
    found.networking.connect_timeout = CONNECT_S
    found.networking.error_backoffs = _Pauses()
    found.queueing.idle_timeout = 1.0
    found.persistence.finalizer = "deltashard.io/never"  # kopf takes its own from whatever bears it
    found.persistence.diffbase_storage = _NoEssence([])
    found.persistence.progress_storage = kopf.MultiProgressStorage([])
    found.process.ultimate_exiting_timeout = None  # the process has its own end
    return found


def quiet() -> None:
    """Have kopf log its warnings alone: it tells of every event and every watch."""
    for name in ("kopf", "aiohttp"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # that signals are not its own


def drop_unclosed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop one message of kopf's end, and hand on all others: an exception handler of kopf's loop.

    kopf cancels the reader of a watch without closing the watch's generators (`queueing.watcher` has no `aclosing`). So
    asyncio closes them when the loop ends, in no order, and one finds that the block around it "didn't stop". Nothing
    is left open by it: the pause waiter is cancelled and the session is closed besides.
    """
    if "generator didn't stop after athrow()" not in str(context.get("exception")):
        loop.default_exception_handler(context)
