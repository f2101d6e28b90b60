"""The store of a policy: its URL as the sidecar takes it, and which credentials the sidecar gets for it.

S3, Google's and Azure's storage have different words for what has to be said. One that is not the kind's own is
refused: what is passed over in silence misleads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from deltashard_operator.api.field import NAME, Fields

ADDRESSINGS = ("auto", "path", "virtual")
ENCRYPTIONS = {"SSE-S3": "AES256", "SSE-KMS": "aws:kms"}
_URL = re.compile(
    r"(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]|gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]|az://[a-z0-9][a-z0-9-]{1,61}[a-z0-9])"
    r"(/[A-Za-z0-9._/=-]*)?",
    re.ASCII,
)
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+(/[a-z0-9]*)?", re.ASCII)
_BARE_ENDPOINT = re.compile(r"https?://[^/]+/?", re.ASCII)
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}", re.ASCII)
_KEY_ID = re.compile(r"[A-Za-z0-9:/_.-]{1,512}", re.ASCII)
_ARN = re.compile(r"[A-Za-z0-9:/+=,.@_-]{1,512}", re.ASCII)
_ONLY = {
    "region": "s3",
    "addressing": "s3",
    "encryption": "s3",
    "account": "az",
}
"""Fields of one kind of store, by its URL's scheme."""
_IDENTITY_ONLY = {
    "roleArn": "s3",
    "stsEndpoint": "s3",
    "clientId": "az",
    "tenantId": "az",
    "authorityHost": "az",
}
_KINDS = {"s3": "S3", "gs": "Google's storage", "az": "Azure's storage"}
AUDIENCES = {"s3": "sts.amazonaws.com", "az": "api://AzureADTokenExchange"}


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


def url_of(store: Fields) -> str:
    """The store's URL with its options; never with credentials."""
    url = store.text("url", "")
    if _URL.fullmatch(url) is None or ".." in urlsplit(url).path:
        store.fail(
            "url",
            "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, without credentials or options",
        )
    scheme = url.partition(":")[0]
    for key, only in _ONLY.items():
        if store.says(key) and scheme != only:
            store.fail(key, f"nothing for {scheme}://: it is a word of {_KINDS[only]}")
    endpoint = store.text("endpoint", "", _ENDPOINT)
    if endpoint and scheme != "az" and _BARE_ENDPOINT.fullmatch(endpoint) is None:
        store.fail("endpoint", "http(s)://host:port without a path")
    encryption = store.fields("encryption")
    addressing = store.choice("addressing", "auto", ADDRESSINGS)
    kind, key_id = "", ""
    if encryption.present:
        kind = encryption.choice("kind", "", tuple(ENCRYPTIONS))
        key_id = encryption.text("keyId", "", _KEY_ID)
        if key_id and kind != "SSE-KMS":
            encryption.fail("keyId", "nothing beside kind SSE-S3, whose keys are the store's own")
    options = {
        "endpoint": endpoint,
        "region": store.text("region", "", _REGION),
        "account": store.text("account", "", _ACCOUNT),
        "addressing": addressing if addressing != "auto" else "",
        "sse": ENCRYPTIONS.get(kind, ""),
        "kms-key-id": key_id,
    }
    said = [f"{key}={quote(value, safe=':/')}" for key, value in options.items() if value]
    return url + ("?" + "&".join(said) if said else "")


def secret_of(store: Fields) -> str | None:
    return store.text("secretName", "", NAME) or None


def identity_of(store: Fields) -> WebIdentity | None:
    """How the sidecar's own service account is a credential; None: it is not."""
    identity = store.fields("webIdentity")
    if not identity.present:
        return None
    scheme = store.text("url", "").partition(":")[0]
    if scheme not in AUDIENCES:
        store.fail(
            "webIdentity",
            "nothing for gs://: GKE gives the pod's service account its identity, by an annotation of that account",
        )
    for key, only in _IDENTITY_ONLY.items():
        if identity.says(key) and scheme != only:
            identity.fail(key, f"nothing for {scheme}://: it is a word of {_KINDS[only]}")
    found = WebIdentity(
        audience=identity.text("audience", "", _ARN) or AUDIENCES[scheme],
        role_arn=identity.text("roleArn", "", _ARN),
        sts_endpoint=identity.text("stsEndpoint", "", _BARE_ENDPOINT),
        client_id=identity.text("clientId", "", _REGION),
        tenant_id=identity.text("tenantId", "", _REGION),
        authority_host=identity.text("authorityHost", "", _BARE_ENDPOINT),
    )
    for key, value in (("clientId", found.client_id), ("tenantId", found.tenant_id)):
        if scheme == "az" and not value:
            identity.fail(key, "the id of the managed identity's client, and of its tenant")
    return found
