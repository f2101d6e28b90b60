"""The built-in issuer of certificates: executes the steps of `rotation` on the API, again and again.

It runs as one task of the controller and keeps three Secrets, a ConfigMap and the caBundle of the webhook's
configuration as they should be. The chart makes these objects, empty; we only ever replace what we read (a conflict is
read again) and patch nothing of the configuration but the bundles. Nothing is remembered from one look to the next but
for how long a bundle has been readable: what a crash leaves is what the next look finds.

Admissions never wait for it: it only has to run for a moment within a month. The fleet service is handed its leaf from
memory (`fleet_leaf`), since the Secret as a volume of the controller's own pod would lag by minutes.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.kube.call import Answer, ApiClient, NoReply, Requester
from deltashard_operator.kube.webhook_configuration import CONFIGURATION
from deltashard_operator.tls import issuance, rotation
from deltashard_operator.tls.metric import AuthorityMetrics
from deltashard_operator.tls.rotation import AUTHORITY, CERTIFICATE, KEY, NEXT_AUTHORITY, Step, Terms

WEBHOOK_SECRET = "deltashard-webhook-tls"  # noqa: S105 - a name
FLEET_SECRET = "deltashard-fleet-tls"  # noqa: S105 - a name
FLEET_AUTHORITY = "deltashard-fleet-ca"
"""Name of the Secret with the fleet's authority and of the ConfigMap with its bundle."""
WEBHOOK_SERVICE, FLEET_SERVICE = "deltashard-webhook", "deltashard-fleet"
TIMEOUT_S = (3.0, 10.0)
"""Seconds to connect, to read."""
MAX_STEPS = 10
"""Steps in one look; four are needed at most, conflicts apart."""
DAY_S = 86400.0
IDLE_S = 1.0
"""Seconds between looks whether it may write."""
_HOOKS = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{CONFIGURATION}"
_log = structlog.get_logger("deltashard.authority")


class AuthorityFault(EnvironmentFault):
    """A look at the certificates could not be finished; `cause` is one of `metric.AUTHORITY_CAUSES`."""

    def __init__(self, cause: str, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.cause = cause


Document = dict[str, Any]


class _Conflict(Exception):
    """Somebody else wrote first: read again."""


class _Denied(Exception):
    """The API did not do what was asked, for another reason than a conflict."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.sentence)
        self.answer = answer


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityOptions:
    """Settings of the issuer."""

    namespace: str = "deltashard-system"
    """Where the Secrets, the ConfigMap and both Services are."""
    webhook_names: tuple[str, ...] = ()
    """More names and addresses the webhook is reached by, beside its Service's."""
    fleet_names: tuple[str, ...] = ()
    """More names and addresses the fleet service is reached by, beside its Service's."""
    leaf_days: float = 90.0
    """Life of a serving certificate; it is renewed at two thirds."""
    fleet_authority_days: float = 3650.0
    """Life of the fleet's authority, which pods carry as long as they live; it gets a successor at two thirds."""
    settle_s: float = 30.0
    """How long a new webhook authority is readable before a certificate of it serves: API servers watch."""
    check_s: float = 15.0
    """Seconds between looks at everything."""

    def webhook_terms(self) -> Terms:
        names = service_names(WEBHOOK_SERVICE, self.namespace) + self.webhook_names
        return Terms(names=names, leaf_s=self.leaf_days * DAY_S, settle_s=self.settle_s)

    def fleet_terms(self) -> Terms:
        return Terms(
            names=service_names(FLEET_SERVICE, self.namespace) + self.fleet_names,
            leaf_s=self.leaf_days * DAY_S,
            authority_s=self.fleet_authority_days * DAY_S,
        )


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    return tuple(f"{service}.{namespace}{end}" for end in ("", ".svc", ".svc.cluster.local"))


class Authority:
    """The issuer. `run` it as a task, or `check` once."""

    def __init__(
        self,
        api: ApiClient,
        options: AuthorityOptions,
        *,
        metrics: AuthorityMetrics | None = None,
        leads: Callable[[], bool] = lambda: True,
        unix: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.metrics = AuthorityMetrics() if metrics is None else metrics
        self._leads = leads
        self._request = Requester(api)
        root = f"/api/v1/namespaces/{options.namespace}"
        self._secrets, self._config_map = f"{root}/secrets", f"{root}/configmaps/{FLEET_AUTHORITY}"
        self._unix = unix
        self._monotonic = monotonic
        self._readable: tuple[bytes, float] | None = None
        """The next authority that is in every caBundle, and since when (monotonic seconds)."""
        self._fleet_leaf: tuple[bytes, bytes] | None = None

    def fleet_leaf(self) -> tuple[bytes, bytes] | None:
        """The fleet service's certificate and key, PEM, once they are stored and vouched for: for `Fleet(tls=...)`."""
        return self._fleet_leaf

    async def run(self) -> None:
        """Look for ever; a fault is counted, said, and met again at the next look."""
        while True:
            if not self._leads():  # another controller issues
                await asyncio.sleep(IDLE_S)
                continue
            for look in (self.check_webhook, self.check_fleet):
                try:
                    await asyncio.to_thread(look)
                except AuthorityFault as fault:
                    self.metrics.failures.labels(fault.cause).inc()
                    _log.warning("authority.failed", cause=fault.cause, error=str(fault))
                except Exception:  # noqa: BLE001 - a certificate must not run out because of one strange answer
                    self.metrics.failures.labels("other").inc()
                    _log.exception("authority.failed")
            await asyncio.sleep(self.options.check_s)

    def check_webhook(self) -> None:
        """Take the webhook's certificates as far as they can go now; raises `AuthorityFault`."""
        terms = self.options.webhook_terms()
        self._settle("webhook", lambda: self._webhook_step(terms))
        self.metrics.checked.labels("webhook").set(self._unix())

    def check_fleet(self) -> None:
        """Take the fleet's certificates as far as they can go now; raises `AuthorityFault`."""
        terms = self.options.fleet_terms()
        self._settle("fleet", lambda: self._fleet_step(terms))
        self.metrics.checked.labels("fleet").set(self._unix())

    def _settle(self, what: str, step: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            try:
                if not step():
                    return
            except _Conflict:
                continue
            except _Denied as error:
                cause = {404: "missing", 403: "forbidden"}.get(error.answer.status, "unavailable")
                raise AuthorityFault(
                    cause,
                    f"the API answered {error}",
                    where=f"certificates of the {what}",
                    remedy="is the chart installed whole?" if cause == "missing" else "it is tried again",
                ) from error
            except NoReply as error:
                raise AuthorityFault(
                    "unavailable",
                    f"the API did not answer: {error.kind}",
                    where=f"certificates of the {what}",
                ) from error
        raise AuthorityFault(
            "conflict", "others write the same objects all the time", where=f"certificates of the {what}"
        )

    # -- one step each: True when something was written --------------------------------------------------------------

    def _webhook_step(self, terms: Terms) -> bool:
        secret = self._secret(WEBHOOK_SECRET)
        configuration = self._call("GET", _HOOKS)
        bundles = [
            _decoded(each["clientConfig"].get("caBundle")) for each in configuration.get("webhooks") or ()
        ]
        data = _data(secret)
        step = rotation.webhook_step(
            data,
            bundles,
            terms,
            now_s=self._unix(),
            published_s=self._published_s(data.get(NEXT_AUTHORITY, b""), bundles),
        )
        if step is None:
            self.metrics.not_after.labels("webhook").set(issuance.not_after_s(data[CERTIFICATE]))
            return False
        if step.bundle is not None:
            self._publish(configuration, step.bundle)
        self._write(step, WEBHOOK_SECRET, secret)
        return True

    def _published_s(self, authority: bytes, bundles: list[bytes]) -> float | None:
        """Seconds for which this authority has been seen in every bundle; None: it is not in all."""
        if not authority or not all(authority in each for each in bundles):
            self._readable = None
            return None
        if self._readable is None or self._readable[0] != authority:
            self._readable = (authority, self._monotonic())
        return self._monotonic() - self._readable[1]

    def _fleet_step(self, terms: Terms) -> bool:
        authority = self._secret(FLEET_AUTHORITY)
        secret = self._secret(FLEET_SECRET)
        published = self._call("GET", self._config_map)
        keys, leaf = _data(authority), _data(secret)
        bundle = (published.get("data") or {}).get(AUTHORITY, "").encode()
        step = rotation.fleet_step(keys, leaf, bundle, terms, now_s=self._unix())
        if step is None:
            self._fleet_leaf = (leaf[CERTIFICATE], leaf[KEY])
            self.metrics.not_after.labels("fleet").set(issuance.not_after_s(leaf[CERTIFICATE]))
            self.metrics.not_after.labels("fleet_authority").set(issuance.not_after_s(keys[AUTHORITY]))
            return False
        if step.authority is not None:
            self._replace(FLEET_AUTHORITY, authority, step.authority)
        if step.bundle is not None:
            data = {**(published.get("data") or {}), AUTHORITY: step.bundle.decode()}
            self._call("PUT", self._config_map, {**published, "data": data})
            self.metrics.published.labels("fleet").inc()
            _log.info("authority.published", bundle="fleet")
        self._write(step, FLEET_SECRET, secret)
        return True

    # -- the API -----------------------------------------------------------------------------------------------------

    def _call(
        self, method: str, path: str, body: Document | None = None, content: str = "application/json"
    ) -> Document:
        """The document of one reply; raises `_Conflict`, `_Denied` and `NoReply`."""
        answer = self._request(method, path, body, content=content, timeout_s=TIMEOUT_S)
        if answer.status == 409:
            raise _Conflict
        if not answer.ok:
            raise _Denied(answer)
        return answer.document

    def _secret(self, name: str) -> Document:
        return self._call("GET", f"{self._secrets}/{name}")

    def _write(self, step: Step, name: str, secret: Document) -> None:
        if step.secret is not None:
            self._replace(name, secret, step.secret)
        if step.issued:
            self.metrics.issued.labels(step.issued).inc()
            _log.info("authority.issued", certificate=step.issued)

    def _replace(self, name: str, secret: Document, data: Mapping[str, bytes]) -> None:
        # The resourceVersion that was read goes along: whoever wrote in between makes it a conflict.
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        self._call("PUT", f"{self._secrets}/{name}", {**secret, "data": encoded})
        _log.info("authority.stored", secret=name)

    def _publish(self, configuration: Document, bundle: bytes) -> None:
        encoded = base64.b64encode(bundle).decode()
        patch = {
            "metadata": {"resourceVersion": configuration["metadata"]["resourceVersion"]},
            "webhooks": [
                {"name": each["name"], "clientConfig": {"caBundle": encoded}}
                for each in configuration.get("webhooks") or ()
            ],
        }
        self._call("PATCH", _HOOKS, patch, "application/strategic-merge-patch+json")
        self.metrics.published.labels("webhook").inc()
        _log.info("authority.published", bundle="webhook")


def _data(secret: Document) -> dict[str, bytes]:
    return {key: _decoded(value) for key, value in (secret.get("data") or {}).items()}


def _decoded(value: str | bytes | None) -> bytes:
    return base64.b64decode(value or b"")
