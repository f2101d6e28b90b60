"""All lookups of an admission share one time budget."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.admission.review import ReviewResult
from deltashard_operator.admission.run_holder import RunHolders
from deltashard_operator.admission.webhook import Webhook
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.policy_cache import BUDGET_S, PolicyCache
from deltashard_operator.kube import cluster_name
from deltashard_operator.kube.api_access import ApiAccess
from deltashard_operator.kube.call import Caller
from deltashard_operator.tls.certificate import Certificate

from tests.support.helm import render
from tests.support.operator import sample
from tests.support.operator.access import access_to

PATIENCE_S = 60.0


@contextlib.contextmanager
def silent() -> Iterator[ApiAccess]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield access_to(listener.getsockname()[1])


def _answer(
    folder: Path, policy: str, *, known: bool = True, watched: tuple[str, ...] = ()
) -> tuple[ReviewResult, float]:
    """Return the answer for a Job with a `run-id` while the API is silent, and the number of unknown run holders.

    `known`: the policy is in the cache.
    """
    (folder / "policy.yaml").write_text(yaml.safe_dump(sample.DEFAULTS))
    metrics = WebhookMetrics()
    notes = {cluster_name.POLICY: policy, cluster_name.RUN_ID: "nightly"}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j", "annotations": notes},
        "spec": {"template": sample.template()},
    }

    async def answered(call: Caller) -> ReviewResult:
        cache = PolicyCache(call)
        if known:
            cache._specs = {("team-a", policy): {"keepLast": 4}}
        webhook = Webhook(
            certificate=Certificate(folder, "webhook", metrics.registry),
            cache=cache,
            holders=RunHolders(call),
            defaults=Defaults(folder / "policy.yaml", None),
            metrics=metrics,
            namespaces=watched,
        )
        end_s = asyncio.get_running_loop().time() + 0.5
        return await webhook.answer(json.dumps(sample.review(job)).encode(), end_s)

    async def scenario() -> ReviewResult:
        with silent() as api:
            call = Caller(api)
            try:
                return await asyncio.wait_for(answered(call), PATIENCE_S)
            finally:
                await call.close()

    answer = asyncio.run(scenario())
    return answer, metrics.registry.get_sample_value("deltashard_webhook_holders_unknown_total") or 0.0


@pytest.mark.parametrize("policy", ["default", "nightly"])
def test_policy_lookup_timeout_is_refused_in_time(tmp_path: Path, policy: str) -> None:
    """The webhook itself answers with a message and a status that clients retry."""
    answer, _ = _answer(tmp_path, policy, known=False)
    assert answer.outcome == "PolicyUnavailable"
    assert answer.review["response"]["status"]["code"] == 503
    assert "did not answer in time" in answer.sentence


@pytest.mark.parametrize("watched", [(), ("team-b", "team-a")])
def test_run_id_lookup_timeout_is_admitted_and_counted(tmp_path: Path, watched: tuple[str, ...]) -> None:
    """The log's fencing decides such a conflict later."""
    answer, unknown = _answer(tmp_path, "nightly", watched=watched)
    assert (answer.outcome, unknown) == ("injected", 1)


@pytest.mark.parametrize(
    ("policy", "watched", "code"),
    [("nightly", "team-b", "NamespaceNotWatched"), ("cluster/nightly", "team-a", "PolicyNotFound")],
)
def test_lookup_without_rights_is_refused_before_any_call(
    tmp_path: Path, policy: str, watched: str, code: str
) -> None:
    answer, unknown = _answer(tmp_path, policy, watched=(watched,))
    assert (answer.outcome, unknown) == (code, 0)


def test_budget_is_shorter_than_webhook_timeout() -> None:
    """This holds for every webhook of the chart."""
    for each in render().find("MutatingWebhookConfiguration")["webhooks"]:
        assert 0 < BUDGET_S < each["timeoutSeconds"]
