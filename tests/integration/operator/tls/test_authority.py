"""The built-in issuer on a real API server, and its certificate in the hands of a real webhook and a real controller."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from deltashard_operator.kube import webhook_configuration
from deltashard_operator.kube.call import Caller
from deltashard_operator.tls import issuance
from deltashard_operator.tls.authority import BUNDLE, SECRET, Authority, AuthorityFault, AuthorityOptions
from kubernetes import client

from tests.support.eventually import eventually, eventually_async
from tests.support.operator.fleet_service import PATIENCE_S
from tests.support.operator.webhook_process import (
    HOOKS,
    WebhookProcess,
    configuration,
    has_sidecar,
    job,
    opted,
)
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.port import free_port

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
        for kind, name in (("Secret", SECRET), ("ConfigMap", BUNDLE)):
            document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
            assert self.rest("POST", self.path(kind), document).status == 201
        assert self.rest("POST", HOOKS, configuration(self.client_config)).status == 201

    def path(self, kind: str, name: str = "") -> str:
        """Of an object in the namespace."""
        return f"/api/v1/namespaces/{self.namespace}/{kind.lower()}s" + (f"/{name}" if name else "")

    def secret(self) -> dict[str, bytes]:
        data = self.rest("GET", self.path("Secret", SECRET)).document.get("data") or {}
        return {key: base64.b64decode(value) for key, value in data.items()}

    def drop(self, *keys: str) -> None:
        """Take keys out of the Secret, as a person would."""
        patch = {"data": dict.fromkeys(keys)}
        path = self.path("Secret", SECRET)
        assert self.rest("PATCH", path, patch, content="application/merge-patch+json").status == 200

    def bundles(self) -> list[bytes]:
        """What pods are injected with, and the caBundle of every webhook."""
        document = self.rest("GET", self.path("ConfigMap", BUNDLE)).document
        webhooks = self.rest("GET", HOOK).document["webhooks"]
        return [
            str((document.get("data") or {}).get("ca.crt", "")).encode(),
            *(base64.b64decode(each["clientConfig"].get("caBundle", "")) for each in webhooks),
        ]

    def versions(self) -> list[str]:
        """Of all objects."""
        paths = [self.path("Secret", SECRET), self.path("ConfigMap", BUNDLE), HOOK]
        return [self.rest("GET", each).document["metadata"]["resourceVersion"] for each in paths]

    def authority(self, unix: Callable[[], float] = time.time, **options: Any) -> Authority:
        """An issuer of this place."""
        return Authority(Caller(self.api), AuthorityOptions(namespace=self.namespace, **options), unix=unix)


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


def value(authority: Authority, name: str, **labels: str) -> float:
    found = authority.metrics.registry.get_sample_value(f"deltashard_authority_{name}", labels)
    assert found is not None, name
    return found


def test_empty_objects_are_filled_once(place: Place) -> None:
    """Everything is of one piece, a second check writes nothing, and a new process goes on with what is there."""
    authority, again = place.authority(), place.authority()

    async def scenario() -> None:
        await authority.check()
        secret = place.secret()
        assert place.bundles() == [secret["ca.crt"]] * 5
        assert issuance.signed_by(secret["tls.crt"], secret["ca.crt"])
        assert issuance.is_for(
            secret["tls.crt"],
            [
                f"deltashard-{service}.{place.namespace}{end}"
                for service in ("webhook", "fleet")
                for end in ("", ".svc", ".svc.cluster.local")
            ],
        )
        versions = place.versions()
        await authority.check()
        await again.check()
        assert place.versions() == versions

    asyncio.run(scenario())
    for certificate in ("authority", "leaf"):
        assert value(authority, "issued_total", certificate=certificate) == 1
        assert value(again, "issued_total", certificate=certificate) == 0
        assert value(again, "not_after_timestamp_seconds", certificate=certificate) > time.time()


def test_what_is_signed_by_a_new_authority_follows_its_bundle(place: Place) -> None:
    """The key is lost when a renewal is due: API servers have a check's time to learn of the new authority."""
    offset_s = 0.0
    authority = place.authority(unix=lambda: time.time() + offset_s)

    async def scenario() -> None:
        nonlocal offset_s
        await authority.check()
        first = place.secret()
        place.drop("ca.key")
        offset_s = 61 * DAY_S
        await authority.check()
        assert place.secret()["tls.crt"] == first["tls.crt"]
        assert all(len(issuance.parse(each)) == 2 for each in place.bundles())
        await authority.check()
        second = place.secret()
        assert not issuance.signed_by(second["tls.crt"], first["ca.crt"])
        assert issuance.signed_by(second["tls.crt"], second["ca.crt"])

    asyncio.run(scenario())


def test_what_is_missing_or_refused_is_said(place: Place, rest: Rest, apiserver: ApiServer) -> None:
    """No object, no right, no API: each by its cause."""
    options = place.authority().options

    async def cause(api: client.ApiClient) -> str:
        with pytest.raises(AuthorityFault) as fault:
            await Authority(Caller(api), options).check()
        return fault.value.cause

    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{free_port()}"
    configuration.retries = False
    with account(apiserver, rest, place.namespace) as weak, client.ApiClient(configuration) as nowhere:
        assert asyncio.run(cause(weak)) == "forbidden"
        assert asyncio.run(cause(nowhere)) == "unavailable"
    assert rest("DELETE", HOOK).status == 200
    assert asyncio.run(cause(place.api)) == "missing"


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
    """Get and update of two objects by name in its own namespace, get and patch of one configuration: no more."""
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": place.namespace}
    role = {
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["secrets"],
                "resourceNames": [SECRET],
                "verbs": ["get", "update"],
            },
            {
                "apiGroups": [""],
                "resources": ["configmaps"],
                "resourceNames": [BUNDLE],
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
        authority = Authority(Caller(api), AuthorityOptions(namespace=place.namespace))

        def allowed() -> bool:
            try:
                asyncio.run(authority.check())
            except AuthorityFault as fault:
                if fault.cause != "forbidden":  # until the API server has seen the roles
                    raise
                return False
            return True

        eventually(allowed, timeout_s=PATIENCE_S, what="the roles")
    assert issuance.parse(place.bundles()[0])


def test_two_issuers_at_once_come_to_one_end(place: Place) -> None:
    """Two that believe to lead: conflicts are read again, and all is of one piece."""

    async def scenario() -> None:
        await asyncio.gather(*(place.authority().check() for _ in range(4)))
        await place.authority().check()

    asyncio.run(scenario())
    secret = place.secret()
    assert all(secret["ca.crt"] in each for each in place.bundles())
    assert issuance.signed_by(secret["tls.crt"], secret["ca.crt"])


def test_it_runs_as_a_task(place: Place) -> None:
    """Faults are counted and do not end it; what was missing is done when it is there."""

    async def scenario() -> None:
        hook = place.rest("GET", HOOK).document
        place.rest("DELETE", HOOK)
        authority = place.authority(check_s=0.05)
        running = asyncio.create_task(authority.run())
        missing = authority.metrics.failures.labels("missing")._value.get
        await eventually_async(lambda: missing() >= 2, "two checks")
        hook["metadata"] = {"name": hook["metadata"]["name"]}
        await asyncio.to_thread(place.rest, "POST", HOOKS, hook)
        await eventually_async(authority.metrics.checked._value.get, "the certificates")
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
def test_no_admission_fails_while_the_certificate_is_rotated(
    apiserver: ApiServer, rest: Rest, api: client.ApiClient, tmp_path: Path
) -> None:
    """A real API server, a real webhook, its Secret as a volume that lags; leaves and authorities change under fire."""
    webhook = WebhookProcess(apiserver, tmp_path)
    webhook.port = free_port()
    url = f"https://127.0.0.1:{webhook.port}{webhook_configuration.PATH}"
    place = Place(rest, api, client_config={"url": url})
    place.install()
    reached_by = ("127.0.0.1", "localhost")

    def sync() -> str:
        """The kubelet: the volume gets what the Secret had a while ago."""
        data = place.secret()
        time.sleep(0.3)
        for name in ("tls.crt", "tls.key"):
            if name in data:
                (tmp_path / name).write_bytes(data[name])
        return ""

    def admit() -> str:
        reply = rest.create(job(f"try-{uuid.uuid4().hex[:8]}", opted()), dry_run=True)
        return "" if reply.status == 201 and has_sidecar(reply) else str(reply.document)

    def shake_hands() -> str:
        """The API server keeps connections; a new one must be possible at every moment, too, also for old pods."""
        return handshake(ssl.create_default_context(cadata=known.decode()), webhook.port)

    try:
        webhook.start(certificate=False)
        with Repeated(sync) as kubelet:
            asyncio.run(place.authority(more_names=reached_by).check())
            known = place.bundles()[0]
            eventually(lambda: webhook.get("healthz")[0] == 200, timeout_s=PATIENCE_S, what="the webhook")
            eventually(lambda: not admit(), timeout_s=PATIENCE_S, what="the configuration in force")
            with Repeated(admit) as admissions, Repeated(shake_hands) as handshakes:
                for turn in range(3):
                    authority = place.authority(more_names=(*reached_by, f"turn-{turn}.example"))
                    if turn == 2:  # whoever has no newer bundle loses the server with the next leaf
                        place.drop("ca.key")
                        asyncio.run(authority.check())
                        known = place.bundles()[0]
                        assert len(issuance.parse(known)) == 2

                    def rotated(authority: Authority = authority) -> bool:
                        asyncio.run(authority.check())
                        return issuance.is_for(served_by(webhook.port), authority.options.terms().names)

                    eventually(rotated, timeout_s=PATIENCE_S, what="the new certificate in service")
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
