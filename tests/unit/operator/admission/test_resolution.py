"""What an admission asks for, without an API to ask."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from deltashard_operator.admission import review
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.admission.resolution import Resolver
from deltashard_operator.admission.run_holder import Holders
from deltashard_operator.api.admission_deadline import Deadline
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.policy_cache import PolicyCache
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy

from tests.support.operator import sample

JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "train", "annotations": {"deltashard.io/policy": "p"}},
    "spec": {"template": sample.template()},
}


class Cache:
    """Policies that are known."""

    def get(self, _namespace: str, _name: str) -> dict[str, Any]:
        return {"store": {"url": "s3://x-y/z"}, "sidecar": {"image": "i"}, "interval": {"every": "60s"}}


def resolved(namespace: str, *watched: str, policy: str = "p") -> list[Policy]:
    """What a Job of this namespace is resolved to."""
    job = {**JOB, "metadata": {"name": "train", "annotations": {"deltashard.io/policy": policy}}}
    resolver = Resolver(
        cache=cast(PolicyCache, Cache()),
        holders=cast(Holders, None),
        defaults=Defaults(None, None),
        metrics=WebhookMetrics(),
        namespaces=watched,
    )
    request = review.parse(json.dumps(sample.review(job, namespace=namespace)).encode())
    assert isinstance(request, review.Request)
    return asyncio.run(resolver.resolve(request, Deadline(5.0)))


@pytest.mark.parametrize("watched", [(), ("team-a",), ("team-b", "team-a")])
def test_a_namespace_that_is_watched_gets_its_policy(watched: tuple[str, ...]) -> None:
    """As all do where none is named."""
    assert len(resolved("team-a", *watched)) == 1


def test_another_one_is_refused_before_anything_is_asked() -> None:
    """Whatever sent it here: the webhook has no right to look there."""
    with pytest.raises(Refusal, match="namespace team-c .*watchNamespaces") as refused:
        resolved("team-c", "team-a")
    assert refused.value.code == "NamespaceNotWatched"


def test_a_clusters_policy_is_named_from_everywhere_unless_some_namespaces_are_watched() -> None:
    """There the webhook has no right to read it, and says so."""
    assert resolved("team-a", policy="cluster/p")[0].name == "cluster/p"
    with pytest.raises(Refusal, match="ClusterCheckpointPolicy p cannot be read"):
        resolved("team-a", "team-a", policy="cluster/p")
