"""What a policy adds to the sidecar beyond its own: variables, volumes with files, the way to the network.

Volumes are of those kinds that bring files and no more: nothing of the node, nothing that is written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_operator.kube.cluster_name import CA_PATH

NO_PROXY = (
    "localhost,127.0.0.1,::1,169.254.169.254,fd00:ec2::254,169.254.170.2,169.254.170.23,[fd00:ec2::23],"
    "100.100.100.200,metadata.google.internal,.svc,.cluster.local"
)
"""What never goes through a policy's proxy: this pod, the services that give a machine its credentials, the cluster."""
CA_FILE = f"{CA_PATH}/ca.crt"
CA_KEY = "ca.crt"
TOKEN_S = 3600
_READ_ONLY = {"readOnly": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Of one policy."""

    env: tuple[tuple[str, str], ...]
    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, str]
    """Variables of the way to the network; an empty one is not set."""
    ca_config_map: str
    """ConfigMap of the workload's namespace with the authorities that the sidecar trusts; empty: the public ones."""
    ca_key: str


def extension_of(sidecar: Mapping[str, Any], network: Mapping[str, Any]) -> Extension:
    """Of a checked policy's `sidecar` and `network`."""
    volumes = sidecar.get("volumes", ())
    bundle = network.get("caBundle", {})
    return Extension(
        env=tuple((each["name"], each["value"]) for each in sidecar.get("env", ())),
        volumes=tuple(map(_volume, volumes)),
        mounts=tuple(
            {"name": each["name"], "mountPath": each["mountPath"], **_READ_ONLY} for each in volumes
        ),
        settings=_settings(network),
        ca_config_map=bundle.get("configMap", ""),
        ca_key=bundle.get("key", CA_KEY),
    )


def _settings(network: Mapping[str, Any]) -> dict[str, str]:
    found = {"HTTPS_PROXY": network.get("httpsProxy", ""), "HTTP_PROXY": network.get("httpProxy", "")}
    if any(found.values()):
        found["NO_PROXY"] = ",".join(filter(None, [NO_PROXY, network.get("noProxy")]))
    if network.get("caBundle", {}).get("configMap"):
        found |= {"AWS_CA_BUNDLE": CA_FILE, "SSL_CERT_FILE": CA_FILE}
    return found


def _volume(volume: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in volume.items() if key != "mountPath"}
    if "csi" in found:
        found["csi"] = {**found["csi"], **_READ_ONLY}
    if "projected" in found:
        found["projected"] = {"sources": [_source(each) for each in found["projected"]["sources"]]}
    return found


def _source(source: Mapping[str, Any]) -> dict[str, Any]:
    token = source.get("serviceAccountToken")
    return dict(source) if token is None else {"serviceAccountToken": {"expirationSeconds": TOKEN_S, **token}}
