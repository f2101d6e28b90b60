"""The webhook's HTTP side: `/mutate` over TLS, and beside it, in plain, `/healthz` and `/metrics`.

Any replica answers anything: no leader, no state but the policy cache. `/healthz` is 200 when a certificate is loaded,
the policies were listed and the controller's authority was read, which is what an endpoint needs before it may be sent
admissions. On SIGTERM it turns 503 while admissions go on for `drain_s`, each answer closing its connection, so that
the API server has gone elsewhere before the sockets close: a rolling upgrade fails no admission.
"""

from __future__ import annotations

import time

import structlog
from aiohttp import web
from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator.admission import review
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.admission.resolution import Resolver
from deltashard_operator.admission.run_holder import Holders
from deltashard_operator.api.admission_deadline import Deadline
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.policy_cache import PolicyCache
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.webhook_configuration import PATH
from deltashard_operator.status_page import pages
from deltashard_operator.tls.certificate import Certificate

MAX_BODY_BYTES = 16 << 20
"""An object is at most 3 MiB; a review holds it once and a little more."""
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
        namespaces: tuple[str, ...] = (),
    ) -> None:
        """`namespaces`: those whose workloads get a sidecar; none named: all."""
        self.certificate = certificate
        self.metrics = metrics
        self.draining = False
        self._resolver = Resolver(
            cache=cache, holders=holders, defaults=defaults, metrics=metrics, namespaces=namespaces
        )
        metrics.policies.set_function(lambda: len(cache))
        metrics.ready.set_function(lambda: int(not self.unready()))

    def applications(self) -> tuple[web.Application, web.Application]:
        """Applications: what is served over TLS, what in plain."""
        secure = web.Application(client_max_size=MAX_BODY_BYTES)
        secure.router.add_post(PATH, self.mutate)
        # It lives as long as its loop turns.
        return secure, pages(self.metrics.registry, dead=list, unready=self.unready)

    def unready(self) -> list[str]:
        """Why admissions cannot be answered; empty when they can."""
        reasons = []
        if self.certificate.loaded is None:
            reasons.append("no certificate is loaded")
        reasons.extend(self._resolver.unready())
        if self.draining:
            reasons.append("stopping")
        return reasons

    async def mutate(self, request: web.Request) -> web.Response:
        """Answer an AdmissionReview: 200 with a review, 400 for a body that is none, 500 for a fault of ours."""
        begun_s = time.perf_counter()
        kind, outcome = "other", "failed"
        deadline = Deadline()
        try:
            answer = await self.answer(await request.read(), deadline)
            kind, outcome = answer.kind, answer.outcome
            if answer.sentence:
                _log.info("admission.refused", kind=kind, code=outcome, sentence=answer.sentence)
            response = web.json_response(answer.review)
        except (review.BadReview, ValueError) as error:
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

    async def answer(self, body: bytes, deadline: Deadline) -> review.Answer:
        """The answer to the body of a request, by its deadline; raises what `parse` and `answer` of `review` raise."""
        request = review.parse(body)
        if isinstance(request, review.Answer):
            return request
        try:
            return review.answer(request, await self._resolver.resolve(request, deadline))
        except Refusal as refusal:
            return review.refused(request.uid, request.kind, refusal)
