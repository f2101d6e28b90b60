"""What an admission has to ask for: the workload's policy, the chart's defaults, who holds the run id it wants.

All looks at the API share the admission's deadline. What is not known by then is an answer, too: without its policy a
workload is refused (with a status that clients try again on), without knowing who holds its run it is admitted.
"""

from __future__ import annotations

import asyncio

import structlog

from deltashard_operator.admission import injection
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.admission.review import AnnotatedTemplate, Request
from deltashard_operator.admission.run_claim import RunClaim
from deltashard_operator.admission.run_holder import UNKNOWN, Holders
from deltashard_operator.api import workload_policy
from deltashard_operator.api.admission_deadline import Deadline
from deltashard_operator.api.chart_defaults import Defaults, FleetAuthorityMissing
from deltashard_operator.api.policy_cache import PolicyCache, Spec, unavailable
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import watched_namespace
from deltashard_operator.kube.cluster_name import POLICY

_log = structlog.get_logger("deltashard.webhook")


class Resolver:
    """Policies, defaults and holders, for one admission after another. Use it on one asyncio loop."""

    def __init__(
        self,
        *,
        cache: PolicyCache,
        holders: Holders,
        defaults: Defaults,
        metrics: WebhookMetrics,
        namespaces: tuple[str, ...] = (),
    ) -> None:
        """`namespaces`: those that may be served; none named: all."""
        self._cache = cache
        self._holders = holders
        self._defaults = defaults
        self._metrics = metrics
        self._namespaces = namespaces
        self._looks: dict[tuple[str, str], asyncio.Task[Spec | None]] = {}
        """Looks for the default policy that are under way, by (namespace, name)."""

    def unready(self) -> list[str]:
        """Why requests cannot be resolved; empty when they can."""
        listing = [] if self._cache.synced else ["the policies are not listed yet"]
        return [*listing, *self._defaults.unready()]

    async def resolve(self, request: Request, deadline: Deadline) -> list[Policy]:
        """The policy of each part of an annotated workload; raises `Refusal`."""
        return [await self._policy(request.namespace, each, deadline) for each in request.parts]

    async def _policy(self, namespace: str, part: AnnotatedTemplate, deadline: Deadline) -> Policy:
        if not watched_namespace.is_watched(namespace, self._namespaces):
            raise not_watched(namespace)
        name = part.annotations.policy
        if self._namespaces and name.startswith(workload_policy.CLUSTER):
            raise Refusal(
                "PolicyNotFound",
                f"{workload_policy.called(name)} cannot be read: deltashard watches some namespaces here and has no "
                "right beyond them",
                where=POLICY,
                remedy="name a CheckpointPolicy of the namespace",
            )
        spec = await self._spec(namespace, name, deadline)
        if spec is None:
            raise workload_policy.not_found(name, default=self._defaults.has_store())
        policy = workload_policy.resolve(name, spec, part.annotations)
        url = injection.store_of(part.target.template) or policy.url
        if part.claim is not None:
            await self._check_holder(part.claim, url, deadline)
        if policy.restore_from and (part.claim is None or not part.claim.workload_uid):
            # Pods of a workload that is there already may have a run that began long ago.
            source = RunClaim(namespace=namespace, run_id=policy.restore_from.partition("@")[0], source=True)
            await self._check_holder(source, url, deadline)
        return policy

    async def _spec(self, namespace: str, name: str, deadline: Deadline) -> Spec | None:
        """The merged spec of a policy: from the cache, else by one live look, else the default of that name."""
        spec = self._cache.get(namespace, name)
        falls_back = name == workload_policy.DEFAULT and self._defaults.has_store()
        # A refusal always rests on a look of its own; only the way to the default may be remembered or shared.
        if spec is None and not (falls_back and self._cache.absent(namespace, name)):
            spec = await self._look(namespace, name, deadline, shared=falls_back)
        try:
            defaults = self._defaults.spec()
        except FleetAuthorityMissing as error:
            raise Refusal("PolicyUnavailable", error.what, where=error.where, remedy=error.remedy) from error
        if spec is not None:
            return workload_policy.merged(spec, defaults)
        return defaults if falls_back else None

    async def _look(self, namespace: str, name: str, deadline: Deadline, *, shared: bool) -> Spec | None:
        """A live look; `shared`: one that is under way will do, so that a slow API is not asked by everyone at once."""
        key = (namespace, name)
        task = self._looks.get(key) if shared else None
        if task is None:
            self._metrics.looks.inc()
            task = asyncio.create_task(asyncio.to_thread(self._cache.look, namespace, name, deadline))
            if shared:
                self._looks[key] = task
                task.add_done_callback(lambda _: self._looks.pop(key, None))
        try:
            async with asyncio.timeout(deadline.left_s()):
                return await asyncio.shield(task)
        except TimeoutError:  # it waits for a thread, or its answer drips
            raise unavailable(name, "the API did not answer in time") from None

    async def _check_holder(self, claim: RunClaim, url: str, deadline: Deadline) -> None:
        """Raise `Refusal` when another live workload is known to hold the run, or another store to have it."""
        try:
            async with asyncio.timeout(deadline.left_s()):
                refusal = await asyncio.to_thread(self._holders.refusal, claim, url, deadline)
        except UNKNOWN as error:
            why = f"{type(error).__name__}: {error}"[:300]
            _log.warning("holders.unknown", namespace=claim.namespace, run_id=claim.run_id, error=why)
            self._metrics.holder_looks.labels("unknown").inc()
            return
        self._metrics.holder_looks.labels("held" if refusal is not None else "free").inc()
        if refusal is not None:
            raise refusal


def not_watched(namespace: str) -> Refusal:
    """The refusal of an annotated workload where nobody looks after it."""
    said = watched_namespace.not_watched(namespace)
    return Refusal("NamespaceNotWatched", said, where=POLICY, remedy=watched_namespace.REMEDY)
