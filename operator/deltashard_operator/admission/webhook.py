"""The webhook: what is served over TLS, and what an admission has to ask for.

An admission asks for the workload's policy, the chart's defaults, and who holds the run id it wants, within one budget:
the API server gives up after the configuration's `timeoutSeconds`, and under failurePolicy Fail that refuses the
workload without a word of ours. What is not known by then is an answer, too: without its policy a workload is refused
(with a status that clients try again on), without knowing who holds its run it is admitted.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from aiohttp import web
from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator.admission import injection, review
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.admission.run_holder import RunClaim, RunHolders
from deltashard_operator.api import workload_policy
from deltashard_operator.api.chart_defaults import Defaults, FleetAuthorityMissing
from deltashard_operator.api.policy_cache import BUDGET_S, PolicyCache, Spec, unavailable
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import watched_namespace
from deltashard_operator.kube.call import ApiUnavailable
from deltashard_operator.kube.cluster_name import POLICY
from deltashard_operator.kube.webhook_configuration import PATH
from deltashard_operator.status_page import pages
from deltashard_operator.tls.certificate import Certificate

MAX_BODY_BYTES = 16 << 20
"""An object is at most 3 MiB; a review holds it once and a little more."""
_log = structlog.get_logger("deltashard.webhook")


class Webhook:
    """The service: two aiohttp applications over certificate, policies and defaults. Use it on one asyncio loop."""

    def __init__(
        self,
        *,
        certificate: Certificate,
        cache: PolicyCache,
        holders: RunHolders,
        defaults: Defaults,
        metrics: WebhookMetrics,
        namespaces: tuple[str, ...] = (),
    ) -> None:
        """`namespaces`: those whose workloads get a sidecar; none named: all."""
        self.certificate = certificate
        self.metrics = metrics
        self.draining = False
        self._cache = cache
        self._holders = holders
        self._defaults = defaults
        self._namespaces = namespaces
        metrics.ready.set_function(lambda: int(not self.unready()))

    def applications(self) -> tuple[web.Application, web.Application]:
        """Applications: what is served over TLS, what in plain."""
        secure = web.Application(client_max_size=MAX_BODY_BYTES)
        secure.router.add_post(PATH, self.mutate)
        return secure, pages(self.metrics.registry, unready=self.unready)

    def unready(self) -> list[str]:
        """Why admissions cannot be answered; empty when they can."""
        reasons = {
            "no certificate is loaded": self.certificate.loaded is None,
            "the policies are not listed yet": not self._cache.synced,
            "stopping": self.draining,
        }
        return [*(reason for reason, holds in reasons.items() if holds), *self._defaults.unready()]

    async def mutate(self, request: web.Request) -> web.Response:
        """Answer an AdmissionReview: 200 with a review, 400 for a body that is none, 500 for a fault of ours."""
        begun_s = time.perf_counter()
        kind, outcome = "other", "failed"
        end_s = asyncio.get_running_loop().time() + BUDGET_S
        try:
            answer = await self.answer(await request.read(), end_s)
            kind, outcome = answer.kind, answer.outcome
            if answer.sentence:
                _log.info("admission.refused", kind=kind, code=outcome, sentence=answer.sentence)
            response = web.json_response(answer.review)
        except (review.InvalidReview, ValueError) as error:
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

    async def answer(self, body: bytes, end_s: float) -> review.ReviewResult:
        """The answer to the body of a request, at this time of the loop at the latest; raises what `review` raises."""
        request = review.parse(body)
        if isinstance(request, review.ReviewResult):
            return request
        try:
            policies = [await self._policy(request.namespace, each, end_s) for each in request.parts]
            return review.answer(request, policies)
        except Refusal as refusal:
            return review.rejection(request.uid, request.kind, refusal)

    async def _policy(self, namespace: str, part: review.AnnotatedTemplate, end_s: float) -> Policy:
        """The policy of a part of an annotated workload; raises `Refusal`."""
        if not watched_namespace.is_watched(namespace, self._namespaces):
            raise not_watched(namespace)
        name = part.annotations.policy
        if self._namespaces and name.startswith(workload_policy.CLUSTER):
            raise Refusal(
                "PolicyNotFound",
                f"{workload_policy.display_name(name)} cannot be read: deltashard watches some namespaces here and has no "
                "right beyond them",
                where=POLICY,
                remedy="name a CheckpointPolicy of the namespace",
            )
        policy = workload_policy.read(name, await self._spec(namespace, name, end_s), part.annotations)
        url = injection.store_of(part.target.template) or policy.url
        if part.claim is not None:
            await self._check_holder(part.claim, url, end_s)
        source = part.annotations.restore_from.partition("@")[0]
        if source and (part.claim is None or not part.claim.workload_uid):
            # Pods of a workload that is there already may have a run that began long ago.
            await self._check_holder(RunClaim(namespace=namespace, run_id=source, source=True), url, end_s)
        return policy

    async def _spec(self, namespace: str, name: str, end_s: float) -> Spec:
        """The merged spec of a policy: from the cache, else by one live look, else the default of that name."""
        spec = self._cache.get(namespace, name)
        if spec is None:
            try:
                async with asyncio.timeout_at(end_s):
                    spec = await self._cache.fetch(namespace, name)
            except TimeoutError:  # it waits for its turn, or its answer drips
                raise unavailable(name, "the API did not answer in time") from None
        try:
            defaults = self._defaults.spec()
        except FleetAuthorityMissing as error:
            raise Refusal("PolicyUnavailable", error.what, where=error.where, remedy=error.remedy) from error
        if spec is None and not (name == workload_policy.DEFAULT and self._defaults.has_store()):
            raise workload_policy.not_found(name, default=self._defaults.has_store())
        return workload_policy.merged(spec or {}, defaults)

    async def _check_holder(self, claim: RunClaim, url: str, end_s: float) -> None:
        """Raise `Refusal` when another live workload is known to hold the run, or another store to have it."""
        try:
            async with asyncio.timeout_at(end_s):
                refusal = await self._holders.refusal(claim, url)
        except (ApiUnavailable, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}"[:300]
            _log.warning(
                "admission.holder_unknown", namespace=claim.namespace, run_id=claim.run_id, error=why
            )
            self.metrics.holder_unknown.inc()
            return
        if refusal is not None:
            raise refusal


def not_watched(namespace: str) -> Refusal:
    """The refusal of an annotated workload where nobody looks after it."""
    message = watched_namespace.not_watched(namespace)
    return Refusal("NamespaceNotWatched", message, where=POLICY, remedy=watched_namespace.REMEDY)
