"""Access to an API at a port of loopback, without TLS."""

from __future__ import annotations

from deltashard_operator.kube.api_access import ApiAccess
from kubernetes import client


def access_to(port: int) -> ApiAccess:
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{port}"
    return ApiAccess(configuration=configuration, headers={})
