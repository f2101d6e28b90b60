"""Watching by kopf on a real API server: what is told, in which order, and what is found when nobody looked."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import pytest
from deltashard_operator.kube import object_watch, watch_session
from deltashard_operator.kube.object_watch import ObjectKey, ObjectWatch, WatchedKind
from kubernetes import client

from tests.support.eventually import eventually
from tests.support.operator.definition import GROUP as EXTENSIONS
from tests.support.operator.running_watch import running
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import free_port

pytestmark = [
    pytest.mark.timeout(900),  # processes start slowly on a busy machine
    # asyncio leaves the socket of a TLS handshake that broke off to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

THINGS = "/apis/watch.test/v1/things"
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "things.watch.test"},
    "spec": {
        "group": "watch.test",
        "scope": "Namespaced",
        "names": {"kind": "Thing", "plural": "things", "singular": "thing"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}
MERGE = "application/merge-patch+json"
FINALIZER = "kopf.zalando.org/KopfFinalizerMarker"
STUCK = """
import asyncio, threading
from deltashard_operator.kube import object_watch
from kubernetes import client

object_watch.END_S = 0.1
begun = threading.Event()

async def stuck(*_):
    begun.set()
    threading.Event().wait()

async def main():
    watch = object_watch.ObjectWatch(client.ApiClient(), (), on_list=print)
    watch._kopf = stuck
    task = asyncio.create_task(watch.run())
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main())
print("over")
"""
"""A watch is cancelled whose kopf stands still, and for ever."""
Document = dict[str, Any]


class Watching:
    """An `ObjectWatch` on a loop of its own, and all that it tells; use as a context manager."""

    def __init__(self, api: client.ApiClient, selector: str = "", namespaces: tuple[str, ...] = ()) -> None:
        self.told: list[tuple[str, str]] = []
        self.known: dict[str, int] = {}
        """Name -> size, as the newest word has it."""
        self.lists = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        kind = WatchedKind("things", THINGS, self._take, self._drop, selector)
        self.watch = ObjectWatch(
            api,
            (kind,),
            namespaces=namespaces,
            on_list=self._listed,
            count=lambda *what: self.counts.update((what,)),
        )
        self._running = running(self.watch)

    def __enter__(self) -> Self:
        self._running.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(*error)

    def _take(self, document: Document) -> None:
        name = document["metadata"]["name"]
        self.told.append(("there", name))
        if document.get("odd"):
            raise ValueError("it is odd")
        self.known[name] = document["size"]

    def _drop(self, key: ObjectKey, last: Document | None) -> None:
        self.told.append(("gone" if last is not None else "went unseen", key.name))
        del self.known[key.name]

    def _listed(self) -> None:
        self.told.append(("listed", ""))
        self.lists += 1

    def learns(self, **known: int) -> None:
        """Wait until exactly these are known."""
        eventually(lambda: self.known == known, what=f"{known}", timeout_s=240)

    def counted(self, what: str) -> int:
        """How often it was counted."""
        return sum(count for (each, _), count in self.counts.items() if each == what)


class Things:
    """Objects to be watched."""

    def __init__(self, http: Rest) -> None:
        self.http = http

    def define(self) -> None:
        """Have the API know them."""
        path = f"/apis/{EXTENSIONS}/customresourcedefinitions"
        assert self.http("POST", path, DEFINITION).status == 201
        eventually(lambda: self.http("GET", THINGS).status == 200, what="the definition")

    def undefine(self) -> None:
        """Have the API forget them, and every one with it."""
        path = f"/apis/{EXTENSIONS}/customresourcedefinitions/things.watch.test"
        assert self.http("DELETE", path).status == 200
        eventually(lambda: self.http("GET", THINGS).status == 404, what="the definition's end")

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
    """An API server of this module's own: it is killed, and its definitions come and go."""
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
def api(server: ApiServer) -> Iterator[client.ApiClient]:
    with server.api() as api:
        yield api


@pytest.fixture
def proxy(server: ApiServer) -> Iterator[FaultyProxy]:
    """Between the watch and the API server."""
    with FaultyProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def proxied(server: ApiServer, proxy: FaultyProxy) -> Iterator[client.ApiClient]:
    """A client by way of the proxy."""
    with server.api() as api:
        api.configuration.host = f"https://127.0.0.1:{proxy.port}"
        yield api


def test_what_is_there_comes_first_then_its_list_then_every_change(
    api: client.ApiClient, things: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pages, chosen by label; nothing is written to what is watched."""
    monkeypatch.setattr(object_watch, "CHUNK", 2)
    mine = {"of": "mine"}
    before = [things.create(f"a{n}", n, labels=mine) for n in range(5)]
    things.create("others", 9)
    with Watching(api, selector="of=mine") as found:
        found.learns(a0=0, a1=1, a2=2, a3=3, a4=4)
        eventually(lambda: found.lists, what="the list's end")
        listed = [*(("there", f"a{n}") for n in range(5)), ("listed", "")]
        assert found.told == listed
        things.create("b", 1, labels=mine)
        found.learns(a0=0, a1=1, a2=2, a3=3, a4=4, b=1)
        things.change("b", 2)
        found.learns(a0=0, a1=1, a2=2, a3=3, a4=4, b=2)
        things.delete("a0")
        found.learns(a1=1, a2=2, a3=3, a4=4, b=2)
        assert found.told == [*listed, ("there", "b"), ("there", "b"), ("gone", "a0")]
        assert found.counted("event") == 8
    assert found.lists == 1
    assert [things.get(f"a{n}") for n in range(1, 5)] == before[1:]


def test_a_start_with_six_hundred_objects(api: client.ApiClient, things: Things) -> None:
    """Kopf waits for ever at its start where it has fewer workers than objects."""
    for n in range(600):
        things.create(f"many-{n}", n)
    with Watching(api) as found:
        found.learns(**{f"many-{n}": n for n in range(600)})
        things.change("many-7", 1000)
        eventually(lambda: found.known["many-7"] == 1000, what="a change after the list", timeout_s=240)


def test_some_namespaces_are_watched_with_rights_in_them_alone(
    server: ApiServer, api: client.ApiClient, things: Things
) -> None:
    """By a user who is refused the list of all: he is told of those, of no other, and of all that changes there."""
    names = [f"watched-{n}-{uuid.uuid4().hex[:6]}" for n in range(3)]
    rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces"
    rules = [{"apiGroups": ["watch.test"], "resources": ["things"], "verbs": ["get", "list", "watch"]}]
    for name in names:
        things.http.namespace(name)
        things.create(name, 0, namespace=name)
    for name in names[:2]:
        role = {"metadata": {"name": "reader"}, "rules": rules}
        assert things.http("POST", f"{rbac}/{name}/roles", role).status == 201
        group = "rbac.authorization.k8s.io"
        bound = {
            "metadata": {"name": "reader"},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
            "subjects": [{"apiGroup": group, "kind": "User", "name": "limited"}],
        }
        assert things.http("POST", f"{rbac}/{name}/rolebindings", bound).status == 201
    api.set_default_header("Impersonate-User", "limited")
    with server.http(user="limited") as limited:
        assert limited("GET", THINGS).status == 403
        path = f"/apis/watch.test/v1/namespaces/{names[1]}/things"
        eventually(lambda: limited("GET", path).status == 200, what="the rights")
    with Watching(api, namespaces=(names[0], names[1])) as found:
        found.learns(**{names[0]: 0, names[1]: 0})
        eventually(lambda: found.counted("watch") == 2, what="both watches")
        for name in names:
            things.create(f"{name}-b", 1, namespace=name)
        found.learns(**{names[0]: 0, names[1]: 0, f"{names[0]}-b": 1, f"{names[1]}-b": 1})
        assert found.watch.freshness.untended() == []
    assert found.lists == 1, "told when both were listed"


def test_a_watch_that_is_cut_goes_on_where_it_was(
    proxied: client.ApiClient, proxy: FaultyProxy, server: ApiServer, things: Things
) -> None:
    things.create("goes", 1)
    things.create("stays", 1)
    with Watching(proxied) as found:
        found.learns(goes=1, stays=1)
        eventually(lambda: found.counted("watch") == 1, what="the watch")
        proxy.upstream_port = free_port()
        proxy.cut()
        things.delete("goes")
        things.change("stays", 2)
        things.create("comes", 1)
        proxy.upstream_port = server.port
        found.learns(stays=2, comes=1)
        assert ("gone", "goes") in found.told
    assert found.lists == 1
    assert found.counted("failure") == 0


def test_an_api_that_is_away_and_forgot_where_a_watch_was_is_listed_again(
    proxied: client.ApiClient, proxy: FaultyProxy, server: ApiServer, things: Things
) -> None:
    """410 Gone: a fresh API server knows no older changes. What went meanwhile is not in the list."""
    things.create("goes", 1)
    things.create("stays", 1)
    things.create("anew", 1)
    with Watching(proxied) as found:
        found.learns(goes=1, stays=1, anew=1)
        eventually(lambda: found.counted("watch") == 1, what="the watch")
        proxy.upstream_port = free_port()
        proxy.cut()
        things.delete("goes")
        things.delete("anew")
        things.create("anew", 2)
        things.change("stays", 2)
        things.create("comes", 1)
        server.kill_api()
        server.start_api()
        proxy.upstream_port = server.port
        found.learns(stays=2, comes=1, anew=2)
        eventually(lambda: found.lists == 2, what="the second list")
        told = found.told[found.told.index(("listed", "")) + 1 :]
        assert told == [
            ("went unseen", "anew"),
            ("there", "anew"),
            ("there", "comes"),
            ("there", "stays"),
            ("went unseen", "goes"),
            ("listed", ""),
        ]
        assert found.watch.freshness.untended() == []
    assert found.counted("failure") == 0


def test_a_watch_may_begin_before_the_api_does(
    proxied: client.ApiClient, proxy: FaultyProxy, server: ApiServer, things: Things
) -> None:
    things.create("there", 1)
    proxy.upstream_port = free_port()
    with Watching(proxied) as found:
        eventually(lambda: found.watch.freshness._discovering > 0, what="a try")
        assert not found.lists
        proxy.upstream_port = server.port
        found.learns(there=1)
    assert found.counted("failure") == 0


def test_a_definition_that_comes_late_goes_and_comes_again_is_watched(
    api: client.ApiClient, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kopf watches what was defined when it began, and ends when that goes: it is begun anew."""
    monkeypatch.setattr(watch_session, "UNRESOLVED_S", 1.0)
    with server.http() as http, Watching(api) as found:
        things = Things(http)
        eventually(lambda: found.counted("failure") > 0, what="a beginning without the definition")
        things.define()
        things.create("first", 1)
        found.learns(first=1)
        failures = found.counted("failure")
        things.undefine()
        eventually(lambda: found.counted("failure") > failures, what="an end")
        things.define()
        things.create("second", 2)
        found.learns(second=2)
        things.undefine()


def test_a_finalizer_of_another_operator_that_runs_on_kopf_stays(
    api: client.ApiClient, things: Things
) -> None:
    """Kopf takes away the one it is set to, which bears its own name unless it is told another."""
    things.create("theirs", 1, metadata={"finalizers": [FINALIZER]})
    with Watching(api) as found:
        found.learns(theirs=1)
        things.change("theirs", 2)
        found.learns(theirs=2)
        before = things.get("theirs")
        things.create("plain", 1)
        found.learns(theirs=2, plain=1)
    assert things.get("theirs") == before
    assert before["metadata"]["finalizers"] == [FINALIZER]
    assert found.counted("failure") == 0
    path = "/apis/watch.test/v1/namespaces/default/things/theirs"
    assert things.http("PATCH", path, {"metadata": {"finalizers": []}}, content=MERGE).status == 200


def test_a_kopf_that_does_not_end_does_not_hold_the_end_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], check=False, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout.decode()) == (0, "over\n"), done.stderr.decode()


def test_an_object_that_is_not_understood_stops_no_other(api: client.ApiClient, things: Things) -> None:
    things.create("odd", 1, odd=True)
    with Watching(api) as found:
        things.create("plain", 1)
        found.learns(plain=1)
        things.change("odd", 2)
        things.change("plain", 2)
        found.learns(plain=2)
        eventually(lambda: found.counted("error") >= 2, what="both errors")
    assert found.counted("failure") == 0


def test_a_right_that_is_missing_and_is_given_does_not_make_it_list_over_and_over(
    api: client.ApiClient, things: Things
) -> None:
    """Only the request that is refused is tried again, with pauses."""
    rights = "/apis/rbac.authorization.k8s.io/v1"
    group = "rbac.authorization.k8s.io"
    role = {
        "metadata": {"name": "lists-things"},
        "rules": [{"apiGroups": ["watch.test"], "resources": ["things"], "verbs": ["list"]}],
    }
    binding = {
        "metadata": {"name": "lists-things"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "lists-things"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "lister"}],
    }
    assert things.http("POST", f"{rights}/clusterroles", role).status == 201
    assert things.http("POST", f"{rights}/clusterrolebindings", binding).status == 201
    things.create("listed", 1)
    tries: list[str] = []
    with client.ApiClient(api.configuration) as limited:
        limited.default_headers["Impersonate-User"] = "lister"
        with Watching(limited) as found:
            tried = found.watch.freshness.tried
            found.watch.freshness.tried = lambda path: (tries.append(path), tried(path))[1]  # type: ignore[method-assign]
            found.learns(listed=1)
            eventually(lambda: len(tries) >= 4, what="the third try to watch")
            rule = {"rules": [{**role["rules"][0], "verbs": ["list", "watch"]}]}
            assert (
                things.http("PATCH", f"{rights}/clusterroles/lists-things", rule, content=MERGE).status == 200
            )
            things.change("listed", 2)
            found.learns(listed=2)
    assert found.lists == 1
    assert found.counted("failure") == 0
    for plural in ("clusterrolebindings", "clusterroles"):
        assert things.http("DELETE", f"{rights}/{plural}/lists-things").status == 200


def test_a_token_is_read_for_each_request(
    server: ApiServer, things: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused is no end: it may be replaced."""
    monkeypatch.setattr(watch_session, "UNAUTHORIZED_S", 0.1)
    path = "/api/v1/namespaces/default/serviceaccounts/default/token"
    token = things.http("POST", path, {"spec": {"expirationSeconds": 3600}}).document["status"]["token"]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    subject = {"kind": "ServiceAccount", "namespace": "default", "name": "default"}
    binding = {"metadata": {"name": "watches-things"}, "roleRef": role, "subjects": [subject]}
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    assert things.http("POST", bindings, binding).status == 201
    things.create("there", 1)
    with server.api() as api:
        configuration = api.configuration
        configuration.cert_file = configuration.key_file = None
        configuration.api_key["authorization"] = "Bearer expired"
        with Watching(api) as found:
            eventually(lambda: found.watch.freshness._discovering > 0, what="a try")
            configuration.api_key["authorization"] = f"Bearer {token}"
            found.learns(there=1)
    assert things.http("DELETE", f"{bindings}/watches-things").status == 200
