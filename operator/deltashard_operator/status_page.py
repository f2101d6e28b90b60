"""HTTP pages of both programs: /livez, /healthz and /metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST


def pages(registry: CollectorRegistry, *, unready: Callable[[], list[str]]) -> web.Application:
    """Return the application: liveness (200), readiness (200, or 503 with the reasons) and the registry's metrics."""

    async def live(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def ready(_request: web.Request) -> web.Response:
        reasons = unready()
        return web.Response(status=503 if reasons else 200, text="; ".join(reasons) or "ok")

    async def scrape(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get("/livez", live)
    application.router.add_get("/healthz", ready)
    application.router.add_get("/metrics", scrape)
    return application
