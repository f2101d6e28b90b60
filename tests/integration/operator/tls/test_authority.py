"""The built-in issuer on a real API server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from deltashard_operator.kube.api_access import ApiAccess
from deltashard_operator.kube.call import Caller
from deltashard_operator.tls import authority as authorities
from deltashard_operator.tls.authority import BUNDLE, HOOKS, SECRET, Authority
from prometheus_client import CollectorRegistry

from tests.support.eventually import eventually_async
from tests.support.operator.webhook_process import HOOKS as ALL_HOOKS
from tests.support.operator.webhook_process import configuration
from tests.support.server.apiserver import ApiServer, Rest


@dataclass
class IssuerNamespace:
    """A namespace with the chart's empty objects, and the webhook's configuration."""

    rest: Rest
    api: ApiAccess
    namespace: str = field(default_factory=lambda: f"system-{uuid.uuid4().hex[:8]}")

    def install(self) -> None:
        self.rest.namespace(self.namespace)
        for kind, name in (("Secret", SECRET), ("ConfigMap", BUNDLE)):
            document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
            assert self.rest.create(document, self.namespace).status == 201

    def configure(self) -> None:
        document = configuration({"url": "https://127.0.0.1:1/mutate"})
        assert self.rest("POST", ALL_HOOKS, document).status == 201

    def objects(self) -> list[dict[str, Any]]:
        root = f"/api/v1/namespaces/{self.namespace}"
        paths = (f"{root}/secrets/{SECRET}", f"{root}/configmaps/{BUNDLE}", HOOKS)
        return [self.rest("GET", path).document for path in paths]

    def is_whole(self) -> bool:
        """Return whether pods and the webhook's clients have the stored authority."""
        secret, published, hooks = self.objects()
        bundles = [each["clientConfig"].get("caBundle") for each in hooks["webhooks"]]
        bundles.append(base64.b64encode(published["data"]["ca.crt"].encode()).decode())
        return set(bundles) == {secret["data"]["ca.crt"]}

    def authority(self, call: Caller) -> Authority:
        return Authority(call, self.namespace, CollectorRegistry())


@pytest.fixture
def place(apiserver: ApiServer, api: ApiAccess) -> Iterator[IssuerNamespace]:
    with apiserver.http() as rest:
        place = IssuerNamespace(rest, api)
        place.install()
        yield place
        rest("DELETE", HOOKS)


def test_empty_objects_are_filled_once_and_repaired(place: IssuerNamespace) -> None:
    """Of two leaders only one writes. A second check writes nothing, and an emptied bundle is restored."""
    place.configure()

    async def scenario() -> None:
        call = Caller(place.api)
        await asyncio.gather(*(place.authority(call).check() for _ in range(4)), return_exceptions=True)
        await place.authority(call).check()
        assert place.is_whole()
        before = place.objects()
        await place.authority(call).check()
        assert place.objects() == before
        changed = {**before[1], "data": {"ca.crt": "damaged"}}
        path = f"/api/v1/namespaces/{place.namespace}/configmaps/{BUNDLE}"
        assert place.rest("PUT", path, changed).status == 200
        await place.authority(call).check()
        assert place.is_whole()
        assert place.objects()[0] == before[0]
        await call.close()

    asyncio.run(scenario())


def test_missing_objects_are_filled_when_created(
    place: IssuerNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults are counted and do not end the issuer."""
    monkeypatch.setattr(authorities, "CHECK_S", 0.05)

    async def scenario() -> None:
        call = Caller(place.api)
        authority = place.authority(call)
        running = asyncio.create_task(authority.run())
        await eventually_async(lambda: authority._failures._value.get() >= 2, "two checks")
        assert not authority.checked
        await asyncio.to_thread(place.configure)
        await eventually_async(lambda: authority.checked, "the certificates")
        assert place.is_whole()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await call.close()

    asyncio.run(scenario())
