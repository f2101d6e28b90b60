"""The chart's default policy: a YAML file of a CheckpointPolicy's `spec`, under every policy of the cluster.

It also says what no namespace should have to: the sidecar's image, and where the controller listens. The authority
that vouches for the controller is a file of its own, read again when it changed, since it outlives no rotation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from deltashard_checkpoint.errors import EnvironmentFault, UserError


class BadDefaults(UserError):
    """The default policy's file is missing or holds no object."""


class FleetAuthorityMissing(EnvironmentFault):
    """The controller's authority cannot be read."""


class Defaults:
    """Default spec and the controller's authority, from files."""

    def __init__(self, path: Path | None, fleet_ca: Path | None) -> None:
        self._spec = {} if path is None else _read(path)
        self._fleet_ca = fleet_ca
        self._seen: tuple[int, int, int] | None = None
        self._pem = ""

    def spec(self) -> dict[str, Any]:
        """The default spec, with the authority's PEM in `fleet.ca`; raises `FleetAuthorityMissing`."""
        fleet = self._spec.get("fleet")
        if self._fleet_ca is None or not isinstance(fleet, dict):
            return self._spec
        return {**self._spec, "fleet": {**fleet, "ca": self._authority(self._fleet_ca)}}

    def has_store(self) -> bool:
        """Whether the default can serve by itself, without a CheckpointPolicy."""
        return "store" in self._spec

    def unready(self) -> list[str]:
        """Why the spec cannot be given yet; empty when it can."""
        try:
            self.spec()
        except FleetAuthorityMissing as error:
            return [error.what]
        return []

    def _authority(self, path: Path) -> str:
        try:
            status = path.stat()
            state = (status.st_ino, status.st_size, status.st_mtime_ns)
            if state != self._seen:
                self._pem = path.read_text(encoding="ascii")
                self._seen = state
        except (OSError, ValueError) as error:
            if not self._pem:
                raise FleetAuthorityMissing(
                    f"the controller's authority cannot be read: {error}",
                    where=str(path),
                    remedy="is the controller running? It issues it",
                ) from None
        return self._pem


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadDefaults(f"the default policy cannot be read: {error}", where=str(path)) from None
    if not isinstance(document, dict):
        raise BadDefaults(
            "the default policy is no object", where=str(path), remedy="give it a policy's spec"
        )
    return document
