"""API server access: configuration by the `kubernetes` client, and aiohttp sessions.

The client's own calls block, and its model classes of the core API alone take 80 MiB of memory. Requests therefore use
aiohttp, like kopf's, and objects are plain documents.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from kubernetes import client, config

TIMEOUT_S = 5.0, 30.0
"""Timeouts in seconds: to connect, and between two reads of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAccess:
    """Address and credentials of the API, and headers of every request."""

    configuration: client.Configuration
    headers: Mapping[str, str]
    """Headers of every request; the User-Agent appears in audit logs and managedFields."""

    def session(
        self,
        *middlewares: aiohttp.ClientMiddlewareType,
        connections: int = 0,
        timeout_s: tuple[float, float] = TIMEOUT_S,
    ) -> aiohttp.ClientSession:
        """Return a session with at most `connections` connections (0: any number). Call it on the loop."""
        asked = self.configuration
        context = ssl.create_default_context(cafile=asked.ssl_ca_cert or None)
        if not asked.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if asked.cert_file:
            context.load_cert_chain(asked.cert_file, asked.key_file)

        async def authorized(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            # Read for each request, because the token may be rotated.
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
    """Return the access by this kubeconfig, or by the pod's service account. Raises `ConfigException`."""
    configuration = client.Configuration()
    if kubeconfig is None:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    return ApiAccess(configuration=configuration, headers={"User-Agent": agent})
