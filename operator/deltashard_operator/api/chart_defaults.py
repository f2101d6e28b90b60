"""The chart's default policy: a YAML file of a CheckpointPolicy's `spec`, under every policy of the cluster.

It also says what no namespace should have to: the sidecar's image, and where the controller listens. The authority
that vouches for the controller is a file of its own, read anew for each admission, since it changes while we serve.
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
        self._pem = ""

    def spec(self) -> dict[str, Any]:
        """The default spec, with the authority's PEM in `fleet.ca`; raises `FleetAuthorityMissing`."""
        if self._fleet_ca is None or "fleet" not in self._spec:
            return self._spec
        try:
            self._pem = self._fleet_ca.read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            if not self._pem:
                raise FleetAuthorityMissing(
                    f"the controller's authority cannot be read: {error}",
                    where=str(self._fleet_ca),
                    remedy="is the controller running? It issues it",
                ) from None
        return {**self._spec, "fleet": {**self._spec["fleet"], "ca": self._pem}}

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
