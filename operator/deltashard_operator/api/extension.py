"""What a policy adds to the sidecar beyond its own: variables, volumes with files, the way to the network.

Volumes are of those kinds that bring files and no more: nothing of the node, nothing that is written to. Where and
how they are named leaves what injection adds alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltashard_operator.api.field import NAME, Fields
from deltashard_operator.kube.cluster_name import CA_PATH, CACHE_PATH, SHM_PATH, TOKEN_PATH

MAX_ENV = 32
MAX_VOLUMES = 8
MAX_SOURCES = 8
RESERVED_ENV = ("HOME", "TMPDIR")
"""Variables of every sidecar, besides DELTASHARD_*; others that this policy sets are refused where it does."""
PROXY_ENV = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "ALL_PROXY", "GRPC_PROXY")
"""In whatever case of letters: gRPC obeys the lower one, and would send the controller's stream there."""
RESERVED_PATHS = (SHM_PATH, CACHE_PATH, "/etc/deltashard", TOKEN_PATH)
"""Nothing may lie in or above these."""
NO_PROXY = (
    *("localhost", "127.0.0.1", "::1"),
    *(
        "169.254.169.254",
        "fd00:ec2::254",
        "169.254.170.2",
        "169.254.170.23",
        "[fd00:ec2::23]",
        "100.100.100.200",
    ),
    *("metadata.google.internal", ".svc", ".cluster.local"),
)
"""What never goes through a policy's proxy: this pod, the services that give a machine its credentials, the cluster."""
CA_FILE = f"{CA_PATH}/ca.crt"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_VOLUME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_PATH = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}", re.ASCII)
_AUDIENCE = re.compile(r"[A-Za-z0-9:/+=,.@_-]{1,512}", re.ASCII)
_DRIVER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}", re.ASCII)
_PROXY = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+/?", re.ASCII)
_NO_PROXY = re.compile(r"[A-Za-z0-9.:*_-]+(,[A-Za-z0-9.:*_-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Of one policy."""

    env: tuple[tuple[str, str], ...] = ()
    volumes: tuple[Mapping[str, Any], ...] = ()
    mounts: tuple[Mapping[str, Any], ...] = ()
    https_proxy: str = ""
    http_proxy: str = ""
    no_proxy: str = ""
    """Besides `NO_PROXY`."""
    ca_config_map: str = ""
    """ConfigMap of the workload's namespace with the authorities that the sidecar trusts; empty: the public ones."""
    ca_key: str = "ca.crt"

    def settings(self) -> dict[str, str]:
        found = {"HTTPS_PROXY": self.https_proxy, "HTTP_PROXY": self.http_proxy}
        if self.https_proxy or self.http_proxy:
            found["NO_PROXY"] = ",".join([*NO_PROXY, *([self.no_proxy] if self.no_proxy else [])])
        if self.ca_config_map:
            found |= {"AWS_CA_BUNDLE": CA_FILE, "SSL_CERT_FILE": CA_FILE}
        return found


def extension_of(sidecar: Fields, network: Fields) -> Extension:
    """A policy's `sidecar.env`, `sidecar.volumes`, `sidecar.volumeMounts` and `network`."""
    volumes = tuple(_volume(each) for each in _distinct(sidecar, "volumes", MAX_VOLUMES, "name"))
    mounts = tuple(
        _mount(each, {volume["name"] for volume in volumes})
        for each in _distinct(sidecar, "volumeMounts", MAX_VOLUMES, "mountPath")
    )
    https_proxy, http_proxy = (network.text(key, "", _PROXY) for key in ("httpsProxy", "httpProxy"))
    no_proxy = network.text("noProxy", "")
    if no_proxy and _NO_PROXY.fullmatch(no_proxy) is None:
        network.fail(
            "noProxy",
            "hosts, addresses and .suffixes with commas between, and no networks such as 10.0.0.0/8",
        )
    if no_proxy and not https_proxy and not http_proxy:
        network.fail("noProxy", "nothing without httpsProxy or httpProxy")
    bundle = network.fields("caBundle")
    return Extension(
        env=tuple(_variable(each) for each in _distinct(sidecar, "env", MAX_ENV, "name")),
        volumes=volumes,
        mounts=mounts,
        https_proxy=https_proxy,
        http_proxy=http_proxy,
        no_proxy=no_proxy,
        ca_config_map=_needed(bundle, "configMap", NAME, "the name of a ConfigMap") if bundle.present else "",
        ca_key=bundle.text("key", "ca.crt", _FILE) or "ca.crt",
    )


def _distinct(fields: Fields, key: str, most: int, by: str) -> Sequence[Fields]:
    """A list's items, no two of one `by`."""
    items = fields.items(key, most)
    seen = [each.text(by, "") for each in items]
    for number, name in enumerate(seen):
        if name in seen[:number]:
            items[number].fail(by, "each name once")
    return items


def _needed(fields: Fields, key: str, pattern: re.Pattern[str], takes: str) -> str:
    value = fields.text(key, "", pattern)
    return value or fields.fail(key, takes)


def _variable(fields: Fields) -> tuple[str, str]:
    fields.only("name", "value")
    name = _needed(fields, "name", _VARIABLE, "a variable's name")
    if name.startswith("DELTASHARD_") or name in RESERVED_ENV:
        fields.fail(
            "name", "a variable that is not the sidecar's own; DELTASHARD_* are settings of this policy"
        )
    if name.upper() in PROXY_ENV:
        fields.fail("name", "no proxy: spec.network has httpsProxy, httpProxy and noProxy")
    value = fields.text("value", "")
    if len(value) > 4096 or "\0" in value:
        fields.fail("value", "text of at most 4096 characters")
    return name, value


def _volume(fields: Fields) -> dict[str, Any]:
    name = _needed(fields, "name", _VOLUME, "a volume's name")
    if name.startswith("deltashard-"):
        fields.fail("name", "a name that does not begin with deltashard-")
    kinds = {"configMap": _config_map, "secret": _secret, "projected": _projected, "csi": _csi}
    fields.only(
        "name",
        *kinds,
        takes="name and one of configMap, secret, projected, csi; nothing of the node (hostPath)",
    )
    stated = [kind for kind in kinds if fields.says(kind)]
    if len(stated) != 1:
        fields.fail("name", f"one of {', '.join(kinds)} beside it, and {len(stated)} are stated")
    kind = stated[0]
    return {"name": name, kind: kinds[kind](fields.fields(kind))}


def _optional(fields: Fields) -> dict[str, Any]:
    return {"optional": True} if fields.boolean("optional", default=False) else {}


def _config_map(fields: Fields) -> dict[str, Any]:
    fields.only("name", "optional")
    return {"name": _needed(fields, "name", NAME, "the name of a ConfigMap"), **_optional(fields)}


def _secret(fields: Fields) -> dict[str, Any]:
    fields.only("secretName", "optional")
    return {"secretName": _needed(fields, "secretName", NAME, "the name of a Secret"), **_optional(fields)}


def _projected(fields: Fields) -> dict[str, Any]:
    fields.only("sources")
    sources = [_source(each) for each in fields.items("sources", MAX_SOURCES)]
    return {"sources": sources} if sources else fields.fail("sources", "a list of sources")


def _source(fields: Fields) -> dict[str, Any]:
    fields.only("serviceAccountToken", "configMap", "secret")
    stated = [kind for kind in ("serviceAccountToken", "configMap", "secret") if fields.says(kind)]
    if len(stated) != 1:
        fields.fail(
            stated[0] if stated else "secret", "one of serviceAccountToken, configMap and secret alone"
        )
    inner = fields.fields(stated[0])
    if stated[0] != "serviceAccountToken":
        inner.only("name", "optional")
        return {stated[0]: {"name": _needed(inner, "name", NAME, "an object's name"), **_optional(inner)}}
    inner.only("audience", "expirationSeconds", "path")
    token = {
        "audience": _needed(inner, "audience", _AUDIENCE, "whom the token is for"),
        "expirationSeconds": inner.integer("expirationSeconds", 3600, low=600, high=86400),
        "path": _needed(inner, "path", _FILE, "a file's name"),
    }
    return {"serviceAccountToken": token}


def _csi(fields: Fields) -> dict[str, Any]:
    fields.only("driver", "volumeAttributes")
    attributes = fields.texts("volumeAttributes", 16)
    found = {"driver": _needed(fields, "driver", _DRIVER, "a driver's name"), "readOnly": True}
    return found | ({"volumeAttributes": attributes} if attributes else {})


def _mount(fields: Fields, volumes: set[str]) -> dict[str, Any]:
    fields.only("name", "mountPath")
    name = fields.text("name", "")
    if name not in volumes:
        fields.fail("name", "the name of a volume of the policy's sidecar.volumes")
    path = _needed(fields, "mountPath", _PATH, "a path such as /etc/my-files").rstrip("/")
    for ours in RESERVED_PATHS:
        if f"{ours}/".startswith(f"{path}/") or path.startswith(f"{ours}/"):
            fields.fail(
                "mountPath", f"a path that neither is in {ours}, which is the sidecar's, nor above it"
            )
    return {"name": name, "mountPath": path, "readOnly": True}
