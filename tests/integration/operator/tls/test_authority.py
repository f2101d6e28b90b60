"""The built-in issuer on a real API server, and its certificates in the hands of a real webhook and a real fleet."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import signal
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.service import Fleet
from deltashard_operator.fleet.token_review import Reviewer
from deltashard_operator.kube import webhook_configuration
from deltashard_operator.tls import issuance
from deltashard_operator.tls.authority import (
    FLEET_AUTHORITY,
    FLEET_SECRET,
    WEBHOOK_SECRET,
    Authority,
    AuthorityFault,
    AuthorityOptions,
)
from kubernetes import client

from tests.support.eventually import eventually, eventually_async
from tests.support.operator.fleet_service import PATIENCE_S, Book, Pod, Reporter
from tests.support.operator.webhook_process import (
    HOOKS,
    WebhookProcess,
    configuration,
    has_sidecar,
    job,
    opted,
)
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.minio_server import free_port

DAY_S = 86400.0
HOOK = f"{HOOKS}/{webhook_configuration.CONFIGURATION}"


@dataclass
class Place:
    """A namespace with the chart's empty objects, and the webhook's configuration."""

    rest: Rest
    api: client.ApiClient
    namespace: str = field(default_factory=lambda: f"system-{uuid.uuid4().hex[:8]}")
    client_config: dict[str, Any] = field(default_factory=lambda: {"url": "https://127.0.0.1:1/mutate"})

    def install(self) -> None:
        """What the chart does."""
        self.rest.namespace(self.namespace)
        for kind, name in (
            ("Secret", WEBHOOK_SECRET),
            ("Secret", FLEET_SECRET),
            ("Secret", FLEET_AUTHORITY),
            ("ConfigMap", FLEET_AUTHORITY),
        ):
            document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
            assert self.rest("POST", self.path(kind), document).status == 201
        assert self.rest("POST", HOOKS, configuration(self.client_config)).status == 201

    def path(self, kind: str, name: str = "") -> str:
        """Of an object in the namespace."""
        return f"/api/v1/namespaces/{self.namespace}/{kind.lower()}s" + (f"/{name}" if name else "")

    def secret(self, name: str) -> dict[str, bytes]:
        """Its data."""
        data = self.rest("GET", self.path("Secret", name)).document.get("data") or {}
        return {key: base64.b64decode(value) for key, value in data.items()}

    def drop(self, name: str, *keys: str) -> None:
        """Take keys out of a Secret, as a person would."""
        patch = {"data": dict.fromkeys(keys)}
        path = self.path("Secret", name)
        assert self.rest("PATCH", path, patch, content="application/merge-patch+json").status == 200

    def bundles(self) -> list[bytes]:
        """The caBundle of every webhook."""
        webhooks = self.rest("GET", HOOK).document["webhooks"]
        return [base64.b64decode(each["clientConfig"].get("caBundle", "")) for each in webhooks]

    def fleet_bundle(self) -> bytes:
        """What pods are injected with."""
        document = self.rest("GET", self.path("ConfigMap", FLEET_AUTHORITY)).document
        return str((document.get("data") or {}).get("ca.crt", "")).encode()

    def versions(self) -> list[str]:
        """Of all objects."""
        paths = [
            *(self.path("Secret", each) for each in (WEBHOOK_SECRET, FLEET_SECRET, FLEET_AUTHORITY)),
            self.path("ConfigMap", FLEET_AUTHORITY),
            HOOK,
        ]
        return [self.rest("GET", each).document["metadata"]["resourceVersion"] for each in paths]

    def authority(self, **changes: Any) -> Authority:
        """An issuer of this place."""
        hands = {key: changes.pop(key) for key in ("unix", "monotonic") if key in changes}
        options = AuthorityOptions(namespace=self.namespace, settle_s=changes.pop("settle_s", 0.5), **changes)
        return Authority(self.api, options, **hands)


@pytest.fixture
def rest(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as rest:
        yield rest


@pytest.fixture
def place(rest: Rest, api: client.ApiClient) -> Iterator[Place]:
    place = Place(rest, api)
    place.install()
    yield place
    rest("DELETE", HOOK)


def check(authority: Authority) -> None:
    authority.check_webhook()
    authority.check_fleet()


def value(authority: Authority, name: str, **labels: str) -> float:
    found = authority.metrics.registry.get_sample_value(f"deltashard_authority_{name}", labels)
    assert found is not None, name
    return found


def test_empty_objects_are_filled_once(place: Place) -> None:
    """Everything is of one piece, a second look writes nothing, and a new process goes on with what is there."""
    authority = place.authority()
    assert authority.fleet_leaf() is None
    check(authority)
    webhook, fleet = place.secret(WEBHOOK_SECRET), place.secret(FLEET_SECRET)
    assert issuance.signed_by(webhook["tls.crt"], webhook["ca.crt"])
    assert place.bundles() == [webhook["ca.crt"]] * 4
    assert issuance.is_for(
        webhook["tls.crt"],
        [f"deltashard-webhook.{place.namespace}{end}" for end in ("", ".svc", ".svc.cluster.local")],
    )
    assert issuance.signed_by(fleet["tls.crt"], place.fleet_bundle())
    assert authority.fleet_leaf() == (fleet["tls.crt"], fleet["tls.key"])
    versions = place.versions()
    check(authority)
    again = place.authority()
    check(again)
    assert place.versions() == versions
    assert again.fleet_leaf() == authority.fleet_leaf()
    for certificate in ("webhook", "fleet", "fleet_authority"):
        assert value(authority, "issued_total", certificate=certificate) == 1
        assert value(again, "issued_total", certificate=certificate) == 0
        assert value(again, "not_after_timestamp_seconds", certificate=certificate) > time.time()


def test_renewal_by_the_clock(place: Place) -> None:
    """After 61 days: the next leaf beside the serving one, the bundle with both, then, settled, the change."""
    offset_s, monotonic_s = 0.0, 0.0
    authority = place.authority(
        settle_s=30.0, unix=lambda: time.time() + offset_s, monotonic=lambda: monotonic_s
    )
    check(authority)
    first = place.secret(WEBHOOK_SECRET)
    offset_s = 61 * DAY_S
    check(authority)
    pending = place.secret(WEBHOOK_SECRET)
    assert pending["tls.crt"] == first["tls.crt"]
    for bundle in place.bundles():
        assert first["ca.crt"] in bundle
        assert pending["next-ca.crt"] in bundle
    monotonic_s = 29.0
    check(authority)
    assert place.secret(WEBHOOK_SECRET) == pending
    monotonic_s = 30.0
    check(authority)
    final = place.secret(WEBHOOK_SECRET)
    assert final == {
        "tls.crt": pending["next.crt"],
        "tls.key": pending["next.key"],
        "ca.crt": pending["next-ca.crt"],
    }
    assert value(authority, "issued_total", certificate="webhook") == 2
    assert value(authority, "issued_total", certificate="fleet") == 2


def test_what_is_missing_or_refused_is_said(
    place: Place, rest: Rest, apiserver: ApiServer, api: client.ApiClient
) -> None:
    """No object, no right, no API: each by its cause, and the other half goes on."""
    assert rest("DELETE", HOOK).status == 200
    authority = place.authority()
    with pytest.raises(AuthorityFault, match="404") as missing:
        authority.check_webhook()
    assert missing.value.cause == "missing"
    authority.check_fleet()
    with account(apiserver, rest, place.namespace) as weak:
        with pytest.raises(AuthorityFault, match="403") as forbidden:
            Authority(weak, authority.options).check_fleet()
        assert forbidden.value.cause == "forbidden"
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{free_port()}"
    configuration.retries = False
    with client.ApiClient(configuration) as nowhere:
        with pytest.raises(AuthorityFault, match="did not answer") as away:
            Authority(nowhere, authority.options).check_webhook()
        assert away.value.cause == "unavailable"


@contextlib.contextmanager
def account(apiserver: ApiServer, rest: Rest, namespace: str) -> Iterator[client.ApiClient]:
    """A client with the rights of a namespace's default service account."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
    reply = rest("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token", request)
    assert reply.status == 201
    configuration = client.Configuration()
    configuration.host = apiserver.url
    configuration.ssl_ca_cert = f"{apiserver.directory}/ca.crt"
    configuration.api_key = {"BearerToken": f"Bearer {reply.document['status']['token']}"}
    with client.ApiClient(configuration) as api:
        yield api


def test_the_rights_it_needs(place: Place, rest: Rest, apiserver: ApiServer) -> None:
    """Get and update of four objects by name in its own namespace, get and patch of one configuration: no more."""
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": place.namespace}
    secrets = [WEBHOOK_SECRET, FLEET_SECRET, FLEET_AUTHORITY]
    role = {
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["secrets"],
                "resourceNames": secrets,
                "verbs": ["get", "update"],
            },
            {
                "apiGroups": [""],
                "resources": ["configmaps"],
                "resourceNames": [FLEET_AUTHORITY],
                "verbs": ["get", "update"],
            },
        ]
    }
    cluster_role = {
        "rules": [
            {
                "apiGroups": ["admissionregistration.k8s.io"],
                "resources": ["mutatingwebhookconfigurations"],
                "resourceNames": [webhook_configuration.CONFIGURATION],
                "verbs": ["get", "patch"],
            }
        ]
    }
    group = "/apis/rbac.authorization.k8s.io/v1"
    inside = f"{group}/namespaces/{place.namespace}"
    for root, kind, rules in (("", "ClusterRole", cluster_role), (inside, "Role", role)):
        document = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": place.namespace},
        }
        assert rest("POST", f"{root or group}/{kind.lower()}s", document | rules).status == 201
        binding = {
            **document,
            "kind": f"{kind}Binding",
            "subjects": [subject],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": place.namespace},
        }
        assert rest("POST", f"{root or group}/{kind.lower()}bindings", binding).status == 201
    with account(apiserver, rest, place.namespace) as api:
        authority = Authority(api, AuthorityOptions(namespace=place.namespace))

        def allowed() -> bool:
            try:
                check(authority)
            except AuthorityFault as fault:
                if fault.cause != "forbidden":  # until the API server has seen the roles
                    raise
                return False
            return True

        eventually(allowed, timeout_s=PATIENCE_S, what="the roles")
    assert issuance.parse(place.bundles()[0])


def test_two_issuers_at_once_come_to_one_end(place: Place) -> None:
    """A second replica by mistake: conflicts are read again, and both serve the same leaf."""
    issuers = [place.authority(settle_s=0.0) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, issuers))
    for each in issuers:
        check(each)
    assert len({each.fleet_leaf() for each in issuers}) == 1
    webhook = place.secret(WEBHOOK_SECRET)
    assert issuance.signed_by(webhook["tls.crt"], place.bundles()[0])


def test_it_runs_as_a_task(place: Place) -> None:
    """Faults are counted and do not end it; what was missing is done when it is there."""

    async def scenario() -> None:
        hook = place.rest("GET", HOOK).document
        place.rest("DELETE", HOOK)
        authority = place.authority(check_s=0.05)
        running = asyncio.create_task(authority.run())
        missing = authority.metrics.failures.labels("missing")._value.get
        await eventually_async(lambda: missing() >= 2, "two looks")
        await eventually_async(authority.fleet_leaf, "the fleet's leaf")
        hook["metadata"] = {"name": hook["metadata"]["name"]}
        await asyncio.to_thread(place.rest, "POST", HOOKS, hook)
        checked = authority.metrics.checked.labels("webhook")._value.get
        await eventually_async(checked, "the webhook's certificates")
        assert not running.done()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


class Repeated:
    """Something done again and again in a thread of its own, its outcomes kept."""

    def __init__(self, work: Callable[[], str]) -> None:
        self._work = work
        self._stop = threading.Event()
        self.done = 0
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                failure = self._work()
            except Exception as error:
                failure = repr(error)
            self.done += 1
            if failure:
                self.failures.append(failure)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_admission_fails_while_the_webhooks_certificate_is_rotated(
    apiserver: ApiServer, rest: Rest, api: client.ApiClient, tmp_path: Any
) -> None:
    """A real API server, a real webhook, and its Secret as a volume that lags; three rotations under fire."""
    webhook = WebhookProcess(apiserver, tmp_path)
    webhook.port = free_port()
    place = Place(
        rest, api, client_config={"url": f"https://127.0.0.1:{webhook.port}{webhook_configuration.PATH}"}
    )
    place.install()
    reached_by = ("127.0.0.1", "localhost")

    def sync() -> str:
        """The kubelet: the volume gets what the Secret had a while ago."""
        data = place.secret(WEBHOOK_SECRET)
        time.sleep(0.3)
        for name in ("tls.crt", "tls.key"):
            if name in data:
                (tmp_path / name).write_bytes(data[name])
        return ""

    def admit() -> str:
        reply = rest.create(job(f"try-{uuid.uuid4().hex[:8]}", opted()), dry_run=True)
        return "" if reply.status == 201 and has_sidecar(reply) else str(reply.document)

    def shake_hands() -> str:
        """The API server keeps connections; a new one must be possible at every moment, too."""
        while True:
            bundle = place.bundles()[0]
            failure = handshake(ssl.create_default_context(cadata=bundle.decode()), webhook.port)
            if not failure or place.bundles()[0] == bundle:
                return failure  # else it was this thread that slept through a change

    try:
        webhook.start(certificate=False)
        with Repeated(sync) as kubelet:
            place.authority(webhook_names=reached_by).check_webhook()
            eventually(lambda: webhook.get("healthz")[0] == 200, timeout_s=PATIENCE_S, what="the webhook")
            eventually(lambda: not admit(), timeout_s=PATIENCE_S, what="the configuration in force")
            with Repeated(admit) as admissions, Repeated(shake_hands) as handshakes:
                for turn in range(3):
                    before = place.secret(WEBHOOK_SECRET)["tls.crt"]
                    names = (*reached_by, f"turn-{turn}.example")
                    authority = place.authority(webhook_names=names, settle_s=3.0)

                    def rotated(authority: Authority = authority, names: tuple[str, ...] = names) -> bool:
                        authority.check_webhook()
                        served = served_by(webhook.port)
                        return issuance.is_for(served, authority.options.webhook_terms().names)

                    eventually(rotated, timeout_s=PATIENCE_S, what="the new certificate in service")
                    assert place.secret(WEBHOOK_SECRET)["tls.crt"] != before
                    tried = admissions.done
                    eventually(
                        lambda tried=tried: admissions.done > tried + 2,  # type: ignore[misc]
                        timeout_s=PATIENCE_S,
                        what="admissions under the new certificate",
                    )
            assert not kubelet.failures
        assert admissions.failures == []
        assert handshakes.failures == []
        assert admissions.done > 10
        assert handshakes.done > 10
        assert len(issuance.parse(place.bundles()[0])) == 4, (
            "old authorities stay while leaves of them are valid"
        )
    finally:
        rest("DELETE", HOOK)
        if webhook.process is not None:
            webhook.stop(signal.SIGKILL)


def served_by(port: int) -> bytes:
    """The leaf a server presents."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_S).encode()


def handshake(context: ssl.SSLContext, port: int) -> str:
    """Why a verified connection is not possible; empty when it is."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as raw:
            with context.wrap_socket(raw, server_hostname="127.0.0.1"):
                return ""
    except OSError as error:
        return repr(error)


def test_the_fleet_serves_what_is_issued_and_its_authority_rotates_with_overlap(
    place: Place, rest: Rest
) -> None:
    """A sidecar injected before the rotation and one after it are both served until the leaf is renewed."""
    pod = Pod.create(rest)
    token = pod.token(rest)

    async def scenario() -> None:
        book, reviewer = Book(), Reviewer(place.api)
        authority = place.authority(fleet_names=("localhost",))
        fleet = Fleet(
            ledger=book, reviewer=reviewer, tls=authority.fleet_leaf, metrics=FleetMetrics(), heartbeat_s=60.0
        )
        await fleet.start("127.0.0.1", 0)
        try:
            assert fleet.unready()
            await asyncio.to_thread(authority.check_fleet)
            await eventually_async(lambda: fleet.port, "the port")
            assert fleet.port is not None
            old = place.fleet_bundle()
            async with Reporter(fleet.port, old, token, pod.hello("first")) as first:
                await first.greet()
                place.drop(FLEET_AUTHORITY, "ca.key")
                await asyncio.to_thread(authority.check_fleet)
                both = place.fleet_bundle()
                assert len(issuance.parse(both)) == 2
                for number, bundle in enumerate((old, both)):
                    async with Reporter(fleet.port, bundle, token, pod.hello(f"overlap-{number}")) as sidecar:
                        await sidecar.greet()
                before = authority.fleet_leaf()
                authority.options = dataclasses.replace(
                    authority.options, fleet_names=("localhost", "127.0.0.1")
                )
                await asyncio.to_thread(authority.check_fleet)
                assert authority.fleet_leaf() != before
                loads = fleet.metrics.loads.labels("loaded")._value.get
                await eventually_async(lambda: loads() >= 2, "the new leaf in service")
                async with Reporter(fleet.port, both, token, pod.hello("after")) as sidecar:
                    await sidecar.greet()
                beats = len(book.heartbeats)
                await first.beat()
                await eventually_async(lambda: len(book.heartbeats) > beats, "the first stream lives on")
        finally:
            await fleet.stop(5.0)
            reviewer.close()

    asyncio.run(scenario())
