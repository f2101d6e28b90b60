"""The store of a checked policy: its URL as the sidecar takes it, and which credentials the sidecar gets for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

_ENCRYPTIONS = {"SSE-S3": "AES256", "SSE-KMS": "aws:kms"}
_AUDIENCES = {"s3": "sts.amazonaws.com", "az": "api://AzureADTokenExchange"}


_IDENTITY = {
    "s3": {"AWS_ROLE_ARN": "roleArn", "AWS_ENDPOINT_URL_STS": "stsEndpoint"},
    "az": {
        "AZURE_CLIENT_ID": "clientId",
        "AZURE_TENANT_ID": "tenantId",
        "AZURE_AUTHORITY_HOST": "authorityHost",
    },
}
"""Variables that say whose token it is, by the URL's scheme, and the fields that they have it of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebIdentity:
    """Store credentials by a projected service account token instead of a Secret."""

    audience: str
    settings: Mapping[str, str]


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
    scheme = store["url"].partition(":")[0]
    return WebIdentity(
        audience=identity.get("audience") or _AUDIENCES[scheme],
        settings={name: identity.get(key, "") for name, key in _IDENTITY[scheme].items()},
    )
