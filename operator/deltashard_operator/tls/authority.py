"""Built-in certificate issuer. Maintains a Secret, a ConfigMap and the webhook's caBundle.

It runs as one task of the leading controller. The chart creates these objects empty. They are replaced with the
resourceVersion that was read, and only the bundles of the webhook configuration are patched. Checks keep no state
between them, so a check completes what a crash interrupted. Webhook and controller mount the Secret as a volume.
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
"""Name of the ConfigMap with the CA that is written into pods."""
CHECK_S = 10.0
HOOKS = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{CONFIGURATION}"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
_log = structlog.get_logger("deltashard.authority")


class Authority:
    """Certificate issuer. `run` it as a task, or call `check` once."""

    def __init__(
        self,
        call: Callable[..., Awaitable[ApiResponse]],
        namespace: str,
        registry: CollectorRegistry,
        *,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """`namespace`: namespace of the Secret, the ConfigMap and both Services."""
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

    async def run(self) -> None:
        """Check forever. Errors are counted, logged and retried at the next check."""
        while True:
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001 - one unexpected response must not let a certificate expire
                self._failures.inc()
                _log.warning("authority.failed", error=f"{type(error).__name__}: {error}"[:500])
            await asyncio.sleep(CHECK_S)

    async def check(self) -> None:
        """Renew expiring certificates and publish the CA. Raises `ApiUnavailable`."""
        secret = await self._call("GET", self._secret)
        before = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
        data = issuance.renewed(before, self._names, now_s=self._unix())
        if data != before:
            encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
            # With the resourceVersion that was read, a concurrent write makes this one a conflict.
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
                f"{method}: {answer.sentence}", where=path, remedy="check that the chart is fully installed"
            )
        return answer.document


def names_in(namespace: str) -> list[str]:
    ends = ("", ".svc", ".svc.cluster.local")
    return [f"deltashard-{each}.{namespace}{end}" for each in ("webhook", "fleet") for end in ends]
