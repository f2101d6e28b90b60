"""Watching with kopf on a real API server: notifications, their order, and changes during an interruption."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import aiohttp
import pytest
from deltashard_operator.kube import object_watch
from deltashard_operator.kube.api_access import ApiAccess
from deltashard_operator.kube.object_watch import ObjectKey, ObjectWatch, WatchedKind, WatchStalled
from kopf._cogs.clients import errors
from kubernetes import client

from tests.support.eventually import eventually
from tests.support.operator.definition import GROUP, define
from tests.support.operator.running_watch import running
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import free_port

pytestmark = [
    pytest.mark.timeout(900),  # processes start slowly on a busy machine
    # asyncio leaves the socket of an aborted TLS handshake to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

THINGS = "/apis/watch.test/v1/things"
MERGE = "application/merge-patch+json"
Document = dict[str, Any]


class WatchRecorder:
    """An `ObjectWatch` on a separate loop that records all notifications. Use it as a context manager."""

    def __init__(self, api: ApiAccess, selector: str = "", namespaces: tuple[str, ...] = ()) -> None:
        self.notifications: list[tuple[str, str]] = []
        self.known: dict[str, int] = {}
        """Name -> size from the newest notification."""
        self.lists = 0
        self.counts: Counter[str] = Counter()
        kind = WatchedKind("things", THINGS, self._take, self._drop, selector)
        self.watch = ObjectWatch(
            api,
            (kind,),
            namespaces=namespaces,
            on_list=self._listed,
            count=lambda outcome, _kind: self.counts.update((outcome,)),
        )
        self._running = running(self.watch)

    def __enter__(self) -> Self:
        self._running.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(*error)

    def _take(self, document: Document) -> None:
        name = document["metadata"]["name"]
        self.notifications.append(("there", name))
        if document.get("odd"):
            raise ValueError("the document is odd")
        self.known[name] = document["size"]

    def _drop(self, key: ObjectKey, last: Document | None) -> None:
        self.notifications.append(("gone" if last is not None else "missed", key.name))
        self.known.pop(key.name, None)

    def _listed(self) -> None:
        self.notifications.append(("listed", ""))
        self.lists += 1

    def wait_for_keys(self, **known: int) -> None:
        eventually(lambda: self.known == known, what=f"{known}", timeout_s=240)


class Things:
    """Custom resources for the watch."""

    def __init__(self, http: Rest) -> None:
        self.http = http

    def define(self) -> None:
        define(self.http, "watch.test", "v1", "Thing")

    def undefine(self) -> None:
        path = f"/apis/{GROUP}/customresourcedefinitions/things.watch.test"
        assert self.http("DELETE", path).status == 200
        eventually(lambda: self.http("GET", THINGS).status == 404, what="the removal of the definition")

    def create(self, name: str, size: int, *, namespace: str = "default", **more: Any) -> Document:
        metadata = {"name": name, **more.pop("metadata", {})}
        metadata.setdefault("labels", more.pop("labels", {}))
        document = {"apiVersion": "watch.test/v1", "kind": "Thing", "size": size, **more}
        path = f"/apis/watch.test/v1/namespaces/{namespace}/things"
        reply = self.http("POST", path, {**document, "metadata": metadata})
        assert reply.status == 201, reply.document
        return reply.document

    def change(self, name: str, size: int) -> None:
        path = f"/apis/watch.test/v1/namespaces/default/things/{name}"
        assert self.http("PATCH", path, {"size": size}, content=MERGE).status == 200

    def delete(self, name: str) -> None:
        assert self.http("DELETE", f"/apis/watch.test/v1/namespaces/default/things/{name}").status == 200

    def get(self, name: str) -> Document:
        return self.http("GET", f"/apis/watch.test/v1/namespaces/default/things/{name}").document


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The server is separate because tests kill it and change its definitions."""
    found = ApiServer(tmp_path_factory.mktemp("watched"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def things(server: ApiServer) -> Iterator[Things]:
    with server.http() as http:
        found = Things(http)
        found.define()
        yield found
        found.undefine()


@pytest.fixture
def api(server: ApiServer) -> ApiAccess:
    return server.access()


@pytest.fixture
def proxy(server: ApiServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def proxied(server: ApiServer, proxy: FaultyProxy) -> ApiAccess:
    api = server.access()
    api.configuration.host = f"https://127.0.0.1:{proxy.port}"
    return api


def test_initial_objects_then_list_then_changes(
    api: ApiAccess, things: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists are paged and filtered by label. An invalid document does not stop the others, and nothing is written."""
    monkeypatch.setattr(object_watch, "CHUNK", 2)
    mine = {"of": "mine"}
    before = [things.create(f"a{n}", n, labels=mine) for n in range(5)]
    things.create("odd", 1, odd=True, labels=mine)
    things.create("others", 9)
    with WatchRecorder(api, selector="of=mine") as found:
        found.wait_for_keys(a0=0, a1=1, a2=2, a3=3, a4=4)
        eventually(lambda: found.lists, what="the end of the list")
        listed = [*(("there", f"a{n}") for n in range(5)), ("there", "odd"), ("listed", "")]
        assert found.notifications == listed
        things.change("odd", 2)
        things.create("b", 1, labels=mine)
        things.change("b", 2)
        things.delete("a0")
        found.wait_for_keys(a1=1, a2=2, a3=3, a4=4, b=2)
        changes = [("there", "odd"), ("there", "b"), ("there", "b"), ("gone", "a0")]
        assert found.notifications == listed + changes
    assert found.counts == {"handled": 8, "handler_failed": 2}
    assert [things.get(f"a{n}") for n in range(1, 5)] == before[1:]


def test_namespaced_watch_needs_namespaced_rights_only(
    server: ApiServer, api: ApiAccess, things: Things
) -> None:
    """A forbidden namespace does not block the others, and its objects appear once the right exists."""
    names = [f"watched-{n}-{uuid.uuid4().hex[:6]}" for n in range(4)]
    rule = {"apiGroups": ["watch.test"], "resources": ["things"], "verbs": ["get", "list", "watch"]}

    def allow(name: str) -> None:
        things.http.grant("limited", name, rule)
        with server.http(user="limited") as limited:
            path = f"/apis/watch.test/v1/namespaces/{name}/things"
            eventually(lambda: limited("GET", path).status == 200, what="the rights")

    for name in names:
        things.http.namespace(name)
        things.create(name, 0, namespace=name)
    allow(names[0])
    allow(names[1])
    with WatchRecorder(
        replace(api, headers={"Impersonate-User": "limited"}), namespaces=(names[0], names[1], names[2])
    ) as found:
        found.wait_for_keys(**{names[0]: 0, names[1]: 0})
        eventually(lambda: found.lists, what="the permitted lists")
        assert found.watch.staleness_s() < object_watch.STALE_S
        for name in names:
            things.create(f"{name}-b", 1, namespace=name)
        found.wait_for_keys(**{names[0]: 0, names[1]: 0, f"{names[0]}-b": 1, f"{names[1]}-b": 1})
        allow(names[2])
        found.wait_for_keys(**dict.fromkeys(names[:3], 0), **{f"{name}-b": 1 for name in names[:3]})


def test_watch_resumes_and_relists_on_gone(
    proxied: ApiAccess, proxy: FaultyProxy, server: ApiServer, things: Things
) -> None:
    """The watch may start before the API. A new API server knows no older changes (410 Gone)."""
    for name in ("goes", "stays", "again"):
        things.create(name, 1)
    upstream, proxy.upstream_port = proxy.upstream_port, free_port()
    with WatchRecorder(proxied) as found:
        proxy.upstream_port = upstream
        found.wait_for_keys(goes=1, stays=1, again=1)
        eventually(lambda: found.lists == 1, what="the list")
        proxy.upstream_port = free_port()
        proxy.disconnect()
        things.delete("goes")
        things.change("stays", 2)
        proxy.upstream_port = upstream
        found.wait_for_keys(stays=2, again=1)
        assert ("gone", "goes") in found.notifications
        assert found.lists == 1
        proxy.upstream_port = free_port()
        proxy.disconnect()
        things.delete("stays")
        things.delete("again")
        things.create("again", 2)
        things.create("comes", 1)
        server.kill_api()
        server.start_api()
        proxy.upstream_port = server.port
        eventually(lambda: found.lists == 2, what="the second list", timeout_s=240)
        notifications = found.notifications[found.notifications.index(("gone", "goes")) + 2 :]
        again = [("missed", "again"), ("there", "again"), ("there", "comes"), ("missed", "stays")]
        assert notifications == [*again, ("listed", "")]
        things.create("later", 3)
        found.wait_for_keys(again=2, comes=1, later=3)


def test_late_and_recreated_definition_is_watched(api: ApiAccess, server: ApiServer) -> None:
    with server.http() as http, WatchRecorder(api) as found:
        things = Things(http)
        for name in ("first", "second"):
            failures = found.counts["failed"]
            eventually(lambda failures=failures: found.counts["failed"] > failures, what="no definition")  # type: ignore[misc]
            things.define()
            things.create(name, 1)
            found.wait_for_keys(**{name: 1})
            things.undefine()


def test_tls_close_error_ends_one_watch(
    api: ApiAccess, things: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise kopf would close the session and wait for a login that never happens."""
    check = errors.check_response
    broken = [aiohttp.ClientOSError("[SSL: APPLICATION_DATA_AFTER_CLOSE_NOTIFY]")]

    async def checked(response: aiohttp.ClientResponse) -> None:
        if broken:
            response.close()
            raise broken.pop()
        await check(response)

    monkeypatch.setattr(errors, "check_response", checked)
    things.create("there", 1)
    with WatchRecorder(api) as found:
        found.wait_for_keys(there=1)
        assert found.counts == {"failed": 1, "handled": 1}


def test_stalled_watch_ends_process_but_api_outage_does_not(
    proxied: ApiAccess, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.upstream_port = free_port()
    monkeypatch.setattr(object_watch, "STALE_S", 2.0)
    monkeypatch.setattr(object_watch, "BACKOFFS_S", (0.1,) * 1000)

    async def scenario() -> None:
        running = asyncio.create_task(WatchRecorder(proxied).watch.run())
        assert not (await asyncio.wait({running}, timeout=3 * object_watch.STALE_S))[0]
        running.cancel()
        await asyncio.wait({running})
        monkeypatch.setattr(ObjectWatch, "_watch_path", lambda _self, _path: asyncio.Event().wait())
        with pytest.RaisesGroup(WatchStalled):
            await WatchRecorder(proxied).watch.run()

    asyncio.run(scenario())


def test_token_is_read_for_each_request(server: ApiServer, things: Things) -> None:
    """A rejected token does not end the watch, because the token may be replaced."""
    path = "/api/v1/namespaces/default/serviceaccounts/default/token"
    token = things.http("POST", path, {"spec": {"expirationSeconds": 3600}}).document["status"]["token"]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    subject = {"kind": "ServiceAccount", "namespace": "default", "name": "default"}
    binding = {"metadata": {"name": "watches-things"}, "roleRef": role, "subjects": [subject]}
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    assert things.http("POST", bindings, binding).status == 201
    things.create("there", 1)
    tries: list[str] = []

    def hook(configuration: client.Configuration) -> None:
        """Read the token again, as the kubernetes client does with a pod's token."""
        configuration.api_key["authorization"] = f"Bearer {token if tries else 'expired'}"
        tries.append("")

    api = server.access()
    api.configuration.cert_file = api.configuration.key_file = None
    api.configuration.refresh_api_key_hook = hook
    api.configuration.api_key["authorization"] = "Bearer expired"
    with WatchRecorder(api) as found:
        found.wait_for_keys(there=1)
    assert things.http("DELETE", f"{bindings}/watches-things").status == 200
