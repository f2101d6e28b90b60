"""HTTP service of the webhook, and the lookups that an admission needs.

An admission looks up the workload's policy, the chart's defaults and the holder of the requested run id within one time
budget: the API server gives up after the configuration's `timeoutSeconds` and, with failurePolicy Fail, rejects the
workload without an explanation. Without the policy the workload is rejected with a retryable status; without the holder
it is admitted.
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
"""An object has at most 3 MiB, and a review contains it once with small overhead."""
_log = structlog.get_logger("deltashard.webhook")


class Webhook:
    """Webhook service: two aiohttp applications over certificate, policies and defaults. Bound to one asyncio loop."""

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
        """Inject in these `namespaces`, or in all if empty."""
        self.certificate = certificate
        self.metrics = metrics
        self.draining = False
        self._cache = cache
        self._holders = holders
        self._defaults = defaults
        self._namespaces = namespaces
        metrics.ready.set_function(lambda: int(not self.unready()))

    def applications(self) -> tuple[web.Application, web.Application]:
        """Return the applications for TLS and for plain HTTP."""
        secure = web.Application(client_max_size=MAX_BODY_BYTES)
        secure.router.add_post(PATH, self.mutate)
        return secure, pages(self.metrics.registry, unready=self.unready)

    def unready(self) -> list[str]:
        """Return why admissions cannot be answered, or an empty list."""
        reasons = {
            "no certificate is loaded": self.certificate.loaded is None,
            "the policies are not listed yet": not self._cache.synced,
            "stopping": self.draining,
        }
        return [*(reason for reason, holds in reasons.items() if holds), *self._defaults.unready()]

    async def mutate(self, request: web.Request) -> web.Response:
        """Answer an AdmissionReview: 200 with a review, 400 for an invalid body, 500 for an internal error."""
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
        except Exception:  # noqa: BLE001 - logged with traceback; the API server needs a response
            _log.exception("admission.failed")
            response = web.Response(status=500, text="internal error; see the webhook's log")
        finally:
            self.metrics.admissions.labels(kind, outcome).inc()
            self.metrics.seconds.observe(time.perf_counter() - begun_s)
        if self.draining:
            response.force_close()
        return response

    async def answer(self, body: bytes, end_s: float) -> review.ReviewResult:
        """Answer a request body before the loop time `end_s`. Raises what `review` raises."""
        request = review.parse(body)
        if isinstance(request, review.ReviewResult):
            return request
        try:
            policies = [await self._policy(request.namespace, each, end_s) for each in request.parts]
            return review.answer(request, policies)
        except Refusal as refusal:
            return review.rejection(request.uid, request.kind, refusal)

    async def _policy(self, namespace: str, part: review.AnnotatedTemplate, end_s: float) -> Policy:
        """Return the policy for a part of an annotated workload. Raises `Refusal`."""
        if not watched_namespace.is_watched(namespace, self._namespaces):
            raise not_watched(namespace)
        name = part.annotations.policy
        if self._namespaces and name.startswith(workload_policy.CLUSTER):
            raise Refusal(
                "PolicyNotFound",
                f"{workload_policy.display_name(name)} cannot be read: deltashard watches only some namespaces here "
                "and has no rights outside them",
                where=POLICY,
                remedy="use a CheckpointPolicy of the namespace",
            )
        policy = workload_policy.read(name, await self._spec(namespace, name, end_s), part.annotations)
        url = injection.store_of(part.target.template) or policy.url
        if part.claim is not None:
            await self._check_holder(part.claim, url, end_s)
        source = part.annotations.restore_from.partition("@")[0]
        if source and (part.claim is None or not part.claim.workload_uid):
            # Pods of an existing workload may belong to a run that began long ago.
            await self._check_holder(RunClaim(namespace=namespace, run_id=source, source=True), url, end_s)
        return policy

    async def _spec(self, namespace: str, name: str, end_s: float) -> Spec:
        """Return the merged spec of a policy: from the cache, by one API request, or the chart's default."""
        spec = self._cache.get(namespace, name)
        if spec is None:
            try:
                async with asyncio.timeout_at(end_s):
                    spec = await self._cache.fetch(namespace, name)
            except TimeoutError:  # queued for a connection, or a slow response
                raise unavailable(name, "the API did not answer in time") from None
        try:
            defaults = self._defaults.spec()
        except FleetAuthorityMissing as error:
            raise Refusal("PolicyUnavailable", error.what, where=error.where, remedy=error.remedy) from error
        if spec is None and not (name == workload_policy.DEFAULT and self._defaults.has_store()):
            raise workload_policy.not_found(name, default=self._defaults.has_store())
        return workload_policy.merged(spec or {}, defaults)

    async def _check_holder(self, claim: RunClaim, url: str, end_s: float) -> None:
        """Raise `Refusal` if another live workload holds the run, or another store contains it."""
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
    message = watched_namespace.not_watched(namespace)
    return Refusal("NamespaceNotWatched", message, where=POLICY, remedy=watched_namespace.REMEDY)
