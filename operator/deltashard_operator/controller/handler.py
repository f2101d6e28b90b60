"""kopf's part: which resources are watched and how. Handlers only hand on.

`on.event` alone is used, which writes nothing: no finalizers, no annotations, no progress. What kopf could still write
or compute for handlers of changes is switched off by storages that store nothing. Jobs and pods are chosen by the
server, by label; nothing else of the cluster's ever reaches this process. A worker limit is not set: with one below the
number of objects kopf can wait for ever at its start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import kopf
import structlog

from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.watch import JOBS, PODS, POLICIES, SELECTOR, Watches

NODES = "/api/v1/nodes"
RUNS = "/apis/deltashard.io/v1alpha1/checkpointruns"
RESOURCES = {JOBS: "jobs", PODS: "pods", NODES: "nodes", POLICIES: "policies", RUNS: "runs"}
"""Watched path -> the metrics' word for it."""
SERVER_S = 240
"""The server ends a watch after so long, and kopf goes on from where it was."""
CLIENT_S = 300
INACTIVITY_S = 75
"""Bookmarks come every minute: a watch without a byte for longer is dead."""
CONNECT_S = 10
CHUNK = 500
_log = structlog.get_logger("deltashard.watches")


class _NoDiffs(kopf.DiffBaseStorage):
    """Remembers nothing of objects, on them or elsewhere."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("nothing may be written to a user's object")


class _NoProgress(kopf.ProgressStorage):
    """The same for handlers' progress."""

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("nothing may be written to a user's object")

    def purge(self, **_: Any) -> None:
        return

    def touch(self, **_: Any) -> None:
        return

    def clear(self, *, essence: Any, **_: Any) -> Any:
        return essence


def settings() -> kopf.OperatorSettings:
    """How kopf watches."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.scanning.disabled = True
    found.peering.standalone = True
    found.watching.server_timeout = SERVER_S
    found.watching.client_timeout = CLIENT_S
    found.watching.connect_timeout = CONNECT_S
    found.watching.inactivity_timeout = INACTIVITY_S
    found.watching.chunk_size = CHUNK
    found.watching.label_selectors["batch", "jobs"] = SELECTOR
    found.watching.label_selectors["", "pods"] = SELECTOR
    found.networking.request_timeout = 60
    found.networking.connect_timeout = CONNECT_S
    found.networking.error_backoffs = (1, 2, 5, 10)
    found.queueing.worker_limit = None
    found.queueing.idle_timeout = 1.0
    found.persistence.diffbase_storage = _NoDiffs()
    found.persistence.progress_storage = _NoProgress()
    found.process.ultimate_exiting_timeout = None  # the process has its own end
    return found


def registry(
    watches: Watches,
    metrics: ControllerMetrics,
    *,
    log_in: Callable[[], kopf.AiohttpSession],
    hand_on: Callable[..., object],
) -> kopf.OperatorRegistry:
    """Handlers for this controller.

    Args:
        watches: where events go.
        metrics: the controller's.
        log_in: makes a session; called on kopf's loop.
        hand_on: has a function called with arguments on the controller's loop, in order.
    """
    found = kopf.OperatorRegistry()

    @kopf.on.login(registry=found)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return log_in()

    targets: tuple[tuple[str, tuple[str, ...], Callable[[str | None, Any], None]], ...] = (
        ("jobs", ("batch", "v1", "jobs"), watches.on_job),
        ("pods", ("", "v1", "pods"), watches.on_pod),
        ("nodes", ("", "v1", "nodes"), watches.on_node),
        ("policies", ("deltashard.io", "v1alpha1", "checkpointpolicies"), watches.on_policy),
        ("runs", ("deltashard.io", "v1alpha1", "checkpointruns"), watches.on_run),
    )

    def handler(resource: str, target: Callable[[str | None, Any], None]) -> Callable[..., Any]:
        handled, errors = metrics.handled.labels(resource), metrics.handler_errors.labels(resource)

        def take(kind: str | None, document: Any) -> None:
            try:
                target(kind, document)
            except Exception:  # noqa: BLE001 - one odd object must not stop the others
                errors.inc()
                name = (document.get("metadata") or {}).get("name", "")
                _log.exception("watch.event_not_understood", resource=resource, name=name)
            handled.inc()

        async def handle(event: Any, **_: Any) -> None:
            hand_on(take, event["type"], event["object"])

        return handle

    for resource, selector, target in targets:
        kopf.on.event(*selector, registry=found, id=resource)(handler(resource, target))
    return found


def quiet() -> None:
    """Kopf tells of every event and every watch; only its warnings are wanted."""
    for name in ("kopf", "aiohttp"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # that signals are not its own


def unclosed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of kopf's loop: drops one message of its end, and hands on all others.

    kopf cancels the reader of a watch without closing the watch's generators (`queueing.watcher` has no `aclosing`). So
    asyncio closes them when the loop ends, all at once and in no order: where `streaming_block` is closed before
    `infinite_watch`, which is inside it, the latter finds that the block "didn't stop". Nothing is left open by it: the
    pause waiter is cancelled and the session is closed besides.
    """
    error = context.get("exception")
    if (
        getattr(context.get("asyncgen"), "__name__", "") == "infinite_watch"
        and isinstance(error, RuntimeError)
        and "generator didn't stop after athrow()" in str(error)
    ):
        return
    loop.default_exception_handler(context)
