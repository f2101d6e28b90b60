"""The store of a checked policy: its URL as the sidecar takes it, and which credentials the sidecar gets for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

_ENCRYPTIONS = {"SSE-S3": "AES256", "SSE-KMS": "aws:kms"}
_AUDIENCES = {"s3": "sts.amazonaws.com", "az": "api://AzureADTokenExchange"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WebIdentity:
    """Store credentials by a projected service account token instead of a Secret."""

    audience: str
    role_arn: str = ""
    sts_endpoint: str = ""
    """Endpoint of AWS's token service; empty: its own."""
    client_id: str = ""
    tenant_id: str = ""
    authority_host: str = ""
    """Of Azure's token service; empty: its own."""


def url_of(store: Mapping[str, Any]) -> str:
    """The store's URL with its options; never with credentials."""
    addressing, encryption = store.get("addressing", "auto"), store.get("encryption", {})
    options = {
        "endpoint": store.get("endpoint"),
        "region": store.get("region"),
        "account": store.get("account"),
        "addressing": addressing if addressing != "auto" else "",
        "sse": _ENCRYPTIONS.get(encryption.get("kind", "")),
        "kms-key-id": encryption.get("keyId"),
    }
    said = [f"{key}={quote(value, safe=':/')}" for key, value in options.items() if value]
    return str(store["url"]) + ("?" + "&".join(said) if said else "")


def mount_of(url: str) -> str:
    """Where the claim of a `file:///mnt/NAME/prefix` is mounted."""
    return "/".join(url.removeprefix("file://").split("/", 3)[:3])


def identity_of(store: Mapping[str, Any]) -> WebIdentity | None:
    """How the sidecar's own service account is a credential; None: it is not."""
    identity = store.get("webIdentity")
    if identity is None:
        return None
    return WebIdentity(
        audience=identity.get("audience") or _AUDIENCES[store["url"].partition(":")[0]],
        role_arn=identity.get("roleArn", ""),
        sts_endpoint=identity.get("stsEndpoint", ""),
        client_id=identity.get("clientId", ""),
        tenant_id=identity.get("tenantId", ""),
        authority_host=identity.get("authorityHost", ""),
    )
