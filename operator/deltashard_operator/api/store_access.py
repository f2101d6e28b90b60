"""Access of a container to a policy's store: URL, variables, and the files that they refer to. Pure.

The sidecar and the Job that removes a run's bytes use the same access: a Secret of the namespace (optional, so that its
absence does not block the pod's start) or a claim (required), a projected token, the CAs of `network.caBundle`
(required, since no connection could be verified without them), and the policy's additional volumes, which only provide
files. A claim needs no network settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from deltashard_operator.kube.cluster_name import (
    CA_PATH,
    CA_VOLUME,
    STORE_PATH,
    STORE_VOLUME,
    TOKEN_PATH,
    TOKEN_VOLUME,
)

if TYPE_CHECKING:
    from deltashard_operator.api.workload_policy import Policy

Document = dict[str, Any]
NO_PROXY = (
    "localhost,127.0.0.1,::1,169.254.169.254,fd00:ec2::254,169.254.170.2,169.254.170.23,[fd00:ec2::23],"
    "100.100.100.200,metadata.google.internal,.svc,.cluster.local"
)
"""Hosts that bypass a policy's proxy: this pod, the machine's credential services, the cluster."""
CA_FILE = f"{CA_PATH}/ca.crt"
TOKEN_S = 3600
_ENCRYPTIONS = {"SSE-S3": "AES256", "SSE-KMS": "aws:kms"}


class _StoreKind(NamedTuple):
    """Variables of one kind of store."""

    secret: str
    token: str = ""
    audience: str = ""
    identity: Mapping[str, str] = {}
    """Identity variables by the policy field that sets them."""


_KINDS = {
    "s3": _StoreKind(
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "sts.amazonaws.com",
        {"roleArn": "AWS_ROLE_ARN", "stsEndpoint": "AWS_ENDPOINT_URL_STS"},
    ),
    "gs": _StoreKind("GOOGLE_APPLICATION_CREDENTIALS"),
    "az": _StoreKind(
        "AZURE_STORAGE_CONNECTION_STRING_FILE",
        "AZURE_FEDERATED_TOKEN_FILE",
        "api://AzureADTokenExchange",
        {
            "clientId": "AZURE_CLIENT_ID",
            "tenantId": "AZURE_TENANT_ID",
            "authorityHost": "AZURE_AUTHORITY_HOST",
        },
    ),
    "file": _StoreKind(""),
}


def _kind(policy: Policy) -> _StoreKind:
    return _KINDS[policy.url.partition(":")[0]]


def url_of(store: Mapping[str, Any]) -> str:
    """Return the store's URL with options, without credentials."""
    addressing, encryption = store.get("addressing"), store.get("encryption", {})
    options = {
        "endpoint": store.get("endpoint"),
        "region": store.get("region"),
        "account": store.get("account"),
        "addressing": addressing if addressing != "auto" else None,
        "sse": _ENCRYPTIONS.get(encryption.get("kind", "")),
        "kms-key-id": encryption.get("keyId"),
    }
    parameters = [f"{key}={quote(value, safe=':/')}" for key, value in options.items() if value]
    return str(store["url"]) + ("?" + "&".join(parameters) if parameters else "")


def settings(policy: Policy) -> dict[str, str]:
    """Return the variables for credentials and network access."""
    store, network, kind = policy.store, policy.network, _kind(policy)
    found: dict[str, str] = {}
    if secret := store.get("secretRef"):
        found[kind.secret] = f"{STORE_PATH}/{secret.get('key', 'credentials')}"
    if (identity := store.get("webIdentity")) is not None:
        found[kind.token] = f"{TOKEN_PATH}/store"
        found |= {name: identity.get(field, "") for field, name in kind.identity.items()}
    if network.get("httpsProxy") or network.get("httpProxy"):
        found |= {"HTTPS_PROXY": network.get("httpsProxy", ""), "HTTP_PROXY": network.get("httpProxy", "")}
        found["NO_PROXY"] = ",".join(filter(None, [NO_PROXY, network.get("noProxy")]))
    if "caBundle" in network:
        found |= {"AWS_CA_BUNDLE": CA_FILE, "SSL_CERT_FILE": CA_FILE}
    return {name: value for name, value in found.items() if value}


def files(
    policy: Policy, tokens: Sequence[tuple[str, str]] = (), *, claim_volume: str = STORE_VOLUME
) -> tuple[list[Document], list[Document]]:
    """Return (volumes of the pod, the container's mounts of them).

    Args:
        policy: policy with the store.
        tokens: additional tokens as (audience, file name).
        claim_volume: name of the volume of the store's claim.
    """
    store, found = policy.store, list[tuple[Document, str]]()
    if secret := store.get("secretRef"):
        source = {"secretName": secret["name"], "optional": True}
        found.append(({"name": STORE_VOLUME, "secret": source}, STORE_PATH))
    if claim := store.get("claim"):
        mount = "/".join(policy.url.removeprefix("file://").split("/", 3)[:3])
        found.append(({"name": claim_volume, "persistentVolumeClaim": {"claimName": claim}}, mount))
    wanted = list(tokens)
    if (identity := store.get("webIdentity")) is not None:
        wanted.append((identity.get("audience") or _kind(policy).audience, "store"))
    if wanted:
        sources = [
            {"serviceAccountToken": {"audience": audience, "expirationSeconds": TOKEN_S, "path": path}}
            for audience, path in wanted
        ]
        found.append(({"name": TOKEN_VOLUME, "projected": {"sources": sources}}, TOKEN_PATH))
    if bundle := policy.network.get("caBundle"):
        items = [{"key": bundle.get("key", "ca.crt"), "path": "ca.crt"}]
        authorities = {"name": bundle["configMap"], "items": items}
        found.append(({"name": CA_VOLUME, "configMap": authorities}, CA_PATH))
    for each in policy.sidecar["volumes"]:
        volume = {key: value for key, value in each.items() if key != "mountPath"}
        if "csi" in volume:
            volume["csi"] = {**volume["csi"], "readOnly": True}
        found.append((volume, each["mountPath"]))
    mounts = [
        {"name": volume["name"], "mountPath": path}
        | ({} if "persistentVolumeClaim" in volume else {"readOnly": True})
        for volume, path in found
    ]
    return [volume for volume, _ in found], mounts
