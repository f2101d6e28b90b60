"""The plain pages of both programs: /livez, /healthz and /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

Reasons = Callable[[], list[str]]
"""Why something is not as it should be; empty when it is."""


def pages(registry: CollectorRegistry, *, dead: Reasons, unready: Reasons) -> web.Application:
    """Liveness and readiness (200, or 503 with the reasons), and the registry's metrics."""

    def saying(ask: Reasons) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def page(_request: web.Request) -> web.Response:
            reasons = ask()
            return web.Response(status=503 if reasons else 200, text="; ".join(reasons) or "ok")

        return page

    async def scrape(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get("/livez", saying(dead))
    application.router.add_get("/healthz", saying(unready))
    application.router.add_get("/metrics", scrape)
    return application
