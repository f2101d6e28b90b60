"""The webhook's HTTP side: `/mutate` over TLS, and beside it, in plain, `/healthz` and `/metrics`.

Any replica answers anything: no leader, no state but the policy cache. `/healthz` is 200 when a certificate is loaded,
the policies were listed and the controller's authority was read, which is what an endpoint needs before it may be sent
admissions. On SIGTERM it turns 503 while admissions go on for `drain_s`, each answer closing its connection, so that
the API server has gone elsewhere before the sockets close: a rolling upgrade fails no admission.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import structlog
from aiohttp import web
from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator.admission import review as admissions
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.admission.run_holder import UNKNOWN, Holders
from deltashard_operator.kube.webhook_configuration import PATH
from deltashard_operator.policy import workload_policy
from deltashard_operator.policy.admission_deadline import Deadline
from deltashard_operator.policy.chart_defaults import Defaults, FleetAuthorityMissing
from deltashard_operator.policy.policy_cache import PolicyCache, Spec, unavailable
from deltashard_operator.policy.refusal import Refusal
from deltashard_operator.tls.certificate import Certificate, CertificateUnusable

MAX_BODY_BYTES = 16 << 20
"""An object is at most 3 MiB; a review holds it once and a little more."""
RELOAD_S = 1.0
"""How often the certificate's files are looked at."""
_log = structlog.get_logger("deltashard.webhook")


class Webhook:
    """The service: two aiohttp applications over certificate, policies and defaults."""

    def __init__(
        self,
        *,
        certificate: Certificate,
        cache: PolicyCache,
        holders: Holders,
        defaults: Defaults,
        metrics: WebhookMetrics,
    ) -> None:
        self.certificate = certificate
        self.cache = cache
        self.holders = holders
        self.defaults = defaults
        self.metrics = metrics
        self.draining = False
        self._looks: dict[tuple[str, str], asyncio.Task[Spec | None]] = {}
        """Under way, for the default policy."""
        metrics.policies.set_function(lambda: len(cache))
        metrics.ready.set_function(lambda: int(not self.unready()))

    def applications(self) -> tuple[web.Application, web.Application]:
        """(served over TLS, served in plain)."""
        secure = web.Application(client_max_size=MAX_BODY_BYTES)
        secure.router.add_post(PATH, self.mutate)
        plain = web.Application()
        plain.router.add_get("/healthz", self.healthz)
        plain.router.add_get("/livez", self.livez)
        plain.router.add_get("/metrics", self.scrape)
        return secure, plain

    def unready(self) -> list[str]:
        """Why admissions cannot be answered; empty when they can."""
        reasons = []
        if self.certificate.loaded is None:
            reasons.append("no certificate is loaded")
        if not self.cache.synced:
            reasons.append("the policies are not listed yet")
        reasons.extend(self.defaults.unready())
        if self.draining:
            reasons.append("stopping")
        return reasons

    async def healthz(self, _request: web.Request) -> web.Response:
        """Readiness."""
        reasons = self.unready()
        return web.Response(status=503 if reasons else 200, text="; ".join(reasons) or "ok")

    async def livez(self, _request: web.Request) -> web.Response:
        """Liveness: the loop turns."""
        return web.Response(text="ok")

    async def scrape(self, _request: web.Request) -> web.Response:
        """Metrics."""
        body, content_type = self.metrics.page()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def mutate(self, request: web.Request) -> web.Response:
        """One AdmissionReview."""
        begun_s = time.perf_counter()
        kind, outcome = "other", "failed"
        deadline = Deadline()
        try:
            review = json.loads(await request.read())
            answer = await self.answer(review, deadline)
            kind, outcome = answer.kind, answer.outcome
            if answer.sentence:
                _log.info("admission.refused", kind=kind, code=outcome, sentence=answer.sentence)
            response = web.json_response(answer.review)
        except (admissions.BadReview, ValueError) as error:
            response = web.Response(status=400, text=str(error))
        except DeltashardError as error:
            _log.error("admission.failed", error=str(error))
            response = web.Response(status=500, text=str(error))
        except Exception:  # noqa: BLE001 - logged whole; the API server must hear of it
            _log.exception("admission.failed")
            response = web.Response(status=500, text="internal error; see the webhook's log")
        finally:
            self.metrics.admissions.labels(kind, outcome).inc()
            self.metrics.seconds.observe(time.perf_counter() - begun_s)
        if self.draining:
            response.force_close()
        return response

    async def answer(self, review: Mapping[str, Any], deadline: Deadline) -> admissions.Answer:
        """The answer to a review, by its deadline; raises what `review.answer` raises."""
        asked = admissions.asked(review)
        found: Spec | Refusal | None = None
        if asked is not None:
            try:
                found = await self._find(asked, deadline)
                await self._check_holder(asked, deadline)
            except Refusal as refusal:
                found = refusal

        def spec_of(_namespace: str, name: str) -> Spec:
            if isinstance(found, Refusal):
                raise found
            if found is None:
                raise workload_policy.not_found(name, default=self.defaults.has_store())
            return found

        return admissions.answer(review, spec_of)

    async def _find(self, asked: admissions.Asked, deadline: Deadline) -> Spec | None:
        """The merged spec of a policy: from the cache, else by one live look, else the default of that name."""
        spec = self.cache.get(asked.namespace, asked.name)
        falls_back = asked.name == workload_policy.DEFAULT and self.defaults.has_store()
        # A refusal always rests on a look of its own; only the way to the default may be remembered or shared.
        if spec is None and not (falls_back and self.cache.absent(asked.namespace, asked.name)):
            spec = await self._look(asked, deadline, shared=falls_back)
        try:
            defaults = self.defaults.spec()
        except FleetAuthorityMissing as error:
            raise Refusal("PolicyUnavailable", error.what, where=error.where, remedy=error.remedy) from error
        if spec is not None:
            return workload_policy.merged(spec, defaults)
        return defaults if falls_back else None

    async def _look(self, asked: admissions.Asked, deadline: Deadline, *, shared: bool) -> Spec | None:
        """A live look; `shared`: one that is under way will do, so that a slow API is not asked by everyone at once."""
        key = (asked.namespace, asked.name)
        task = self._looks.get(key) if shared else None
        if task is None:
            self.metrics.looks.inc()
            task = asyncio.create_task(asyncio.to_thread(self.cache.look, *key, deadline))
            if shared:
                self._looks[key] = task
                task.add_done_callback(lambda _: self._looks.pop(key, None))
        try:
            async with asyncio.timeout(deadline.left_s()):
                return await asyncio.shield(task)
        except TimeoutError:  # it waits for a thread, or its answer drips
            raise unavailable(asked.name, "the API did not answer in time") from None

    async def _check_holder(self, asked: admissions.Asked, deadline: Deadline) -> None:
        """Raise `Refusal` (RunIdTaken) when another live workload is known to hold the run that is asked for."""
        if not asked.run_id:
            return
        try:
            async with asyncio.timeout(deadline.left_s()):
                refusal = await asyncio.to_thread(self.holders.refusal, asked, deadline)
        except UNKNOWN as error:
            why = f"{type(error).__name__}: {error}"[:300]
            _log.warning("holders.unknown", namespace=asked.namespace, run_id=asked.run_id, error=why)
            self.metrics.holder_looks.labels("unknown").inc()
            return
        self.metrics.holder_looks.labels("held" if refusal is not None else "free").inc()
        if refusal is not None:
            raise refusal

    def reload(self) -> None:
        """Take a changed certificate into service; a bad one is counted and said, and the old one stays."""
        try:
            if not self.certificate.refresh():
                return
        except CertificateUnusable as error:
            self.metrics.reloads.labels("failed").inc()
            _log.warning("certificate.unusable", error=str(error))
            return
        self.metrics.reloads.labels("loaded").inc()
        if self.certificate.loaded is not None:
            self.metrics.not_after.set(self.certificate.loaded.not_after_s)
            _log.info("certificate.loaded", not_after_s=self.certificate.loaded.not_after_s)

    async def watch_certificate(self) -> None:
        """Reload for ever."""
        while True:
            self.reload()
            await asyncio.sleep(RELOAD_S)
