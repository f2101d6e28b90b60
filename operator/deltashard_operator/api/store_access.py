"""How a container reaches a policy's store: the variables it needs, and the files they name. Pure.

The same for the sidecar and for a Job that removes a run's bytes: a Secret of the namespace (optional: its absence must
not keep a pod from starting) or a claim (without it there is no store), a projected token, the authorities of
`network.caBundle` (which a pod waits for: without, nothing could be trusted), and what the policy adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltashard_operator.api import store_spec
from deltashard_operator.api.extension import TOKEN_S
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube.cluster_name import (
    CA_PATH,
    CA_VOLUME,
    STORE_PATH,
    STORE_VOLUME,
    TOKEN_PATH,
    TOKEN_VOLUME,
)

_SECRET_VARIABLES = {
    "s3": "AWS_SHARED_CREDENTIALS_FILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_CONNECTION_STRING_FILE",
}
"""Which variable names the file of the store's Secret, by the URL's scheme."""
_TOKEN_VARIABLES = {"s3": "AWS_WEB_IDENTITY_TOKEN_FILE", "az": "AZURE_FEDERATED_TOKEN_FILE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Volumes of a pod, and a container's mounts of them."""

    volumes: tuple[dict[str, Any], ...]
    mounts: tuple[dict[str, Any], ...]


def settings(policy: Policy) -> dict[str, str]:
    """Variables of the credentials and of the way to the network; an empty one is not set."""
    scheme, found = policy.url.partition(":")[0], {}
    if policy.secret_name:
        found[_SECRET_VARIABLES[scheme]] = f"{STORE_PATH}/{policy.secret_key}"
    if (identity := policy.web_identity) is not None:
        found |= {_TOKEN_VARIABLES[scheme]: TOKEN_PATH + "/store", **identity.settings}
    return found | dict(policy.extension.settings)


def files(
    policy: Policy, tokens: Sequence[tuple[str, str]] = (), *, claim_volume: str = STORE_VOLUME
) -> Files:
    """The files.

    Args:
        policy: whose store it is.
        tokens: others than the store's, (audience, file name), each.
        claim_volume: name of the volume of the store's claim.
    """
    volumes: list[Mapping[str, Any]] = []
    mounts: list[Mapping[str, Any]] = []
    if policy.secret_name:
        secret = {"secretName": policy.secret_name, "optional": True}
        volumes.append({"name": STORE_VOLUME, "secret": secret})
        mounts.append({"name": STORE_VOLUME, "mountPath": STORE_PATH, "readOnly": True})
    if policy.claim:
        volumes.append({"name": claim_volume, "persistentVolumeClaim": {"claimName": policy.claim}})
        mounts.append({"name": claim_volume, "mountPath": store_spec.mount_of(policy.url)})
    wanted = [
        *tokens,
        *([(policy.web_identity.audience, "store")] if policy.web_identity is not None else []),
    ]
    if wanted:
        volumes.append({"name": TOKEN_VOLUME, "projected": {"sources": list(map(_token, wanted))}})
        mounts.append({"name": TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": True})
    extension = policy.extension
    if extension.ca_config_map:
        items = [{"key": extension.ca_key, "path": "ca.crt"}]
        volumes.append({"name": CA_VOLUME, "configMap": {"name": extension.ca_config_map, "items": items}})
        mounts.append({"name": CA_VOLUME, "mountPath": CA_PATH, "readOnly": True})
    volumes += extension.volumes
    mounts += extension.mounts
    return Files(volumes=tuple(map(dict, volumes)), mounts=tuple(map(dict, mounts)))


def _token(wanted: tuple[str, str]) -> dict[str, Any]:
    audience, path = wanted
    return {"serviceAccountToken": {"audience": audience, "expirationSeconds": TOKEN_S, "path": path}}
