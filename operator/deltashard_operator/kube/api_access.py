"""The API server, as the user's `kubernetes` client reads its configuration, and sessions with it on an asyncio loop.

The client's own calls block, and its model classes of the core API alone would be 80 MiB of a process: requests are
aiohttp's, as those of kopf are, and objects are documents.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from kubernetes import client, config

TIMEOUT_S = 5.0, 30.0
"""Seconds to connect, and between two pieces of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAccess:
    """Where the API is, who it is, and who asks."""

    configuration: client.Configuration
    headers: Mapping[str, str]
    """Of every request: audit logs and managedFields have its User-Agent."""

    def session(
        self,
        *middlewares: aiohttp.ClientMiddlewareType,
        connections: int = 0,
        timeout_s: tuple[float, float] = TIMEOUT_S,
    ) -> aiohttp.ClientSession:
        """A session with these around each request; `connections` at once, 0: any number. Make it on the loop."""
        asked = self.configuration
        context = ssl.create_default_context(cafile=asked.ssl_ca_cert or None)
        if not asked.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if asked.cert_file:
            context.load_cert_chain(asked.cert_file, asked.key_file)

        async def authorized(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            # Read for each request: a token may rotate.
            token = asked.get_api_key_with_prefix("BearerToken", alias="authorization")
            if token:
                request.headers["Authorization"] = token
            return await handler(request)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, ssl=context),
            headers=self.headers,
            middlewares=(authorized, *middlewares),
            timeout=aiohttp.ClientTimeout(sock_connect=timeout_s[0], sock_read=timeout_s[1]),
        )


def api_access(kubeconfig: Path | None, agent: str) -> ApiAccess:
    """By this kubeconfig, or as the pod's service account; raises `ConfigException`."""
    configuration = client.Configuration()
    if kubeconfig is None:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    return ApiAccess(configuration=configuration, headers={"User-Agent": agent})
