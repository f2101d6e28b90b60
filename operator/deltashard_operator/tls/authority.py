"""The built-in issuer of certificates: keeps a Secret, a ConfigMap and the webhook's caBundle as they should be.

It runs as one task of the controller that leads. The chart makes these objects, empty; they are only ever replaced as
they were read, and of the webhook's configuration the bundles alone are patched. Nothing is remembered from one check
to the next: what a crash leaves is what the next check finds. Webhook and controller have the Secret as a volume.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from cryptography import x509
from prometheus_client import CollectorRegistry, Counter, Gauge

from deltashard_operator.kube.call import ApiResponse, ApiUnavailable
from deltashard_operator.kube.webhook_configuration import CONFIGURATION
from deltashard_operator.tls import issuance

SECRET = "deltashard-tls"  # noqa: S105 - a name
BUNDLE = "deltashard-fleet-ca"
"""Name of the ConfigMap with the authority that is written into pods."""
CHECK_S = 10.0
HOOKS = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{CONFIGURATION}"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
_log = structlog.get_logger("deltashard.authority")


class Authority:
    """The issuer. `run` it as a task, or `check` once."""

    def __init__(
        self,
        call: Callable[..., Awaitable[ApiResponse]],
        namespace: str,
        registry: CollectorRegistry,
        *,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """`namespace`: where the Secret, the ConfigMap and both Services are."""
        self._request = call
        self._secret = f"/api/v1/namespaces/{namespace}/secrets/{SECRET}"
        self._config_map = f"/api/v1/namespaces/{namespace}/configmaps/{BUNDLE}"
        self._names = names_in(namespace)
        self._unix = unix
        self._not_after = Gauge(
            "deltashard_authority_not_after_timestamp_seconds",
            "End of the validity of the authority, Unix time",
            registry=registry,
        )
        self._failures = Counter("deltashard_authority_failures", "Checks that failed", registry=registry)
        self.checked = False
        """Whether all was as it should be once: installing waits for it."""

    async def run(self) -> None:
        """Check for ever; a fault is counted, logged, and met again at the next check."""
        while True:
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001 - a certificate must not run out because of one strange answer
                self._failures.inc()
                _log.warning("authority.failed", error=f"{type(error).__name__}: {error}"[:500])
            await asyncio.sleep(CHECK_S)

    async def check(self) -> None:
        """Renew what is due, and publish the authority; raises `ApiUnavailable`."""
        secret = await self._call("GET", self._secret)
        before = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
        data = issuance.renewed(before, self._names, now_s=self._unix())
        if data != before:
            encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
            # The resourceVersion that was read goes along: whoever wrote in between makes it a conflict.
            await self._call("PUT", self._secret, {**secret, "data": encoded})
            _log.info("authority.issued", authority=data["ca.crt"] != before.get("ca.crt"))
        await self._publish(data["ca.crt"])
        ends = x509.load_pem_x509_certificate(data["ca.crt"]).not_valid_after_utc
        self._not_after.set(ends.timestamp())
        self.checked = True

    async def _publish(self, authority: bytes) -> None:
        published, hooks = await self._call("GET", self._config_map), await self._call("GET", HOOKS)
        data = {"ca.crt": authority.decode()}
        if published.get("data") != data:
            await self._call("PUT", self._config_map, {**published, "data": data})
        wanted = {"caBundle": base64.b64encode(authority).decode()}
        webhooks = hooks.get("webhooks") or []
        if any(each["clientConfig"].get("caBundle") != wanted["caBundle"] for each in webhooks):
            patch = {
                "metadata": {"resourceVersion": hooks["metadata"]["resourceVersion"]},
                "webhooks": [{"name": each["name"], "clientConfig": wanted} for each in webhooks],
            }
            await self._call("PATCH", HOOKS, patch, content=STRATEGIC_MERGE)
            _log.info("authority.published")

    async def _call(self, method: str, path: str, *body: Any, **more: Any) -> dict[str, Any]:
        answer = await self._request(method, path, *body, **more)
        if not answer.ok:
            raise ApiUnavailable(
                f"{method}: {answer.sentence}", where=path, remedy="is the chart installed whole?"
            )
        return answer.document


def names_in(namespace: str) -> list[str]:
    """Names of both Services."""
    ends = ("", ".svc", ".svc.cluster.local")
    return [f"deltashard-{each}.{namespace}{end}" for each in ("webhook", "fleet") for end in ends]
