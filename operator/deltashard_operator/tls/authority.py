"""The built-in issuer of certificates: executes the steps of `rotation` on the API, again and again.

It runs as one task of the controller that leads and keeps a Secret, a ConfigMap and the caBundle of the webhook's
configuration as they should be. The chart makes these objects, empty; they are only ever replaced as they were read (a
conflict is read again), and of the configuration the bundles alone are patched. Nothing is remembered from one check to
the next: what a crash leaves is what the next check finds. Webhook and controller have the Secret as a volume.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.kube.call import Answer, ApiUnavailable
from deltashard_operator.kube.webhook_configuration import CONFIGURATION
from deltashard_operator.tls import issuance, rotation
from deltashard_operator.tls.metric import AuthorityMetrics
from deltashard_operator.tls.rotation import AUTHORITY, CERTIFICATE, Terms

SECRET = "deltashard-tls"  # noqa: S105 - a name
BUNDLE = "deltashard-fleet-ca"
"""Name of the ConfigMap with the authorities that are written into pods."""
SERVICES = ("deltashard-webhook", "deltashard-fleet")
MAX_STEPS = 10
"""Steps in one check; three are needed at most, conflicts apart."""
LEAF_S = 90 * 86400.0
"""Life of the serving certificate; it is renewed at two thirds."""
AUTHORITY_S = 3650 * 86400.0
"""Life of the authority, which pods carry as long as they live; it gets a successor at two thirds."""
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
_HOOKS = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{CONFIGURATION}"
_CAUSES = {403: "forbidden", 404: "missing", 409: "conflict"}
_log = structlog.get_logger("deltashard.authority")
Document = dict[str, Any]


class Call(Protocol):
    """A request to the API, as `kube.call.Caller` has it."""

    def __call__(self, method: str, path: str, *args: Any, **more: Any) -> Awaitable[Answer]: ...


class AuthorityFault(EnvironmentFault):
    """A check of the certificates could not be finished; `cause` is one of `metric.CAUSES`."""

    def __init__(self, cause: str, what: str, *, remedy: str = "it is tried again") -> None:
        super().__init__(what, where="certificates", remedy=remedy)
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityOptions:
    """Settings of the issuer."""

    namespace: str = "deltashard-system"
    """Where the Secret, the ConfigMap and both Services are."""
    more_names: tuple[str, ...] = ()
    """Names and addresses of the servers beside their Services'."""
    check_s: float = 15.0

    def terms(self) -> Terms:
        ends = ("", ".svc", ".svc.cluster.local")
        names = tuple(f"{service}.{self.namespace}{end}" for service in SERVICES for end in ends)
        return Terms(names=names + self.more_names, leaf_s=LEAF_S, authority_s=AUTHORITY_S)


class Authority:
    """The issuer. `run` it as a task, or `check` once."""

    def __init__(
        self,
        call: Call,
        options: AuthorityOptions,
        *,
        metrics: AuthorityMetrics | None = None,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.options = options
        self.metrics = AuthorityMetrics() if metrics is None else metrics
        self._requested = call
        root = f"/api/v1/namespaces/{options.namespace}"
        self._secret, self._config_map = f"{root}/secrets/{SECRET}", f"{root}/configmaps/{BUNDLE}"
        self._unix = unix
        self.checked = False
        """Whether all was as it should be once: installing waits for it."""

    async def run(self) -> None:
        """Check for ever; a fault is counted, logged, and met again at the next check."""
        while True:
            try:
                await self.check()
            except AuthorityFault as fault:
                self.metrics.failures.labels(fault.cause).inc()
                _log.warning("authority.failed", cause=fault.cause, error=str(fault))
            except Exception:  # noqa: BLE001 - a certificate must not run out because of one strange answer
                self.metrics.failures.labels("other").inc()
                _log.exception("authority.failed")
            await asyncio.sleep(self.options.check_s)

    async def check(self) -> None:
        """Take the certificates as far as they can go now; raises `AuthorityFault`."""
        fault: AuthorityFault | None = None
        for _ in range(MAX_STEPS):
            try:
                if not await self._step():
                    self.metrics.checked.set(self._unix())
                    self.checked = True
                    return
            except AuthorityFault as error:
                if error.cause != "conflict":  # which is read again
                    raise
                fault = error
        raise fault or AuthorityFault("other", "the steps do not end")

    async def _step(self) -> bool:
        """Do the next step; False when there is none for now."""
        secret, published, hooks = [
            await self._call("GET", path) for path in (self._secret, self._config_map, _HOOKS)
        ]
        data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
        bundles = [
            (published.get("data") or {}).get(AUTHORITY, "").encode(),
            *(base64.b64decode(each["clientConfig"].get("caBundle") or b"") for each in _webhooks(hooks)),
        ]
        now_s = self._unix()
        step = rotation.next_step(data, bundles, self.options.terms(), now_s=now_s)
        if step is None:
            for certificate, key in (("leaf", CERTIFICATE), ("authority", AUTHORITY)):
                self.metrics.not_after.labels(certificate).set(issuance.not_after_s(data[key]))
            return False
        if step.secret is not None:
            encoded = {key: base64.b64encode(value).decode() for key, value in step.secret.items()}
            # The resourceVersion that was read goes along: whoever wrote in between makes it a conflict.
            await self._call("PUT", self._secret, {**secret, "data": encoded})
        if step.issued:
            self.metrics.issued.labels(step.issued).inc()
            _log.info("authority.issued", certificate=step.issued)
        if step.bundle is None:
            return True
        await self._publish(published, hooks, step.bundle)
        # API servers watch the configuration: what is signed by a new authority has time until the next check.
        return not rotation.serves(data, now_s=now_s)

    async def _publish(self, published: Document, hooks: Document, bundle: bytes) -> None:
        data = {**(published.get("data") or {}), AUTHORITY: bundle.decode()}
        await self._call("PUT", self._config_map, {**published, "data": data})
        patch = {"clientConfig": {"caBundle": base64.b64encode(bundle).decode()}}
        body = {
            "metadata": {"resourceVersion": hooks["metadata"]["resourceVersion"]},
            "webhooks": [{"name": each["name"], **patch} for each in _webhooks(hooks)],
        }
        await self._call("PATCH", _HOOKS, body, content=STRATEGIC_MERGE)
        self.metrics.published.inc()
        _log.info("authority.published")

    async def _call(self, method: str, path: str, *body: Mapping[str, Any], **more: Any) -> Document:
        """The document of one reply; raises `AuthorityFault`."""
        try:
            answer = await self._requested(method, path, *body, **more)
        except ApiUnavailable as error:
            raise AuthorityFault("unavailable", str(error)) from error
        if answer.ok:
            return answer.document
        cause = _CAUSES.get(answer.status, "unavailable")
        remedy = {"remedy": "is the chart installed whole?"} if cause == "missing" else {}
        raise AuthorityFault(cause, f"{method} {path}: the API answered {answer.sentence}", **remedy)


def _webhooks(configuration: Document) -> list[Document]:
    return configuration.get("webhooks") or []
