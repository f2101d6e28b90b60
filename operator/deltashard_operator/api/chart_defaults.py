"""The chart's default policy: a YAML file with a CheckpointPolicy's `spec` that all policies extend.

It also contains cluster-wide settings: the sidecar's image and the controller's address. The CA of the controller is a
separate file, read again for each admission because it can change while serving.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from deltashard_checkpoint.errors import EnvironmentFault, UserError


class BadDefaults(UserError):
    """The default policy's file is missing or does not contain an object."""


class FleetAuthorityMissing(EnvironmentFault):
    """The CA of the controller cannot be read."""


class Defaults:
    """Default spec and CA of the controller, from files."""

    def __init__(self, path: Path | None, fleet_ca: Path | None) -> None:
        self._spec = {} if path is None else _read(path)
        self._fleet_ca = fleet_ca
        self._pem = ""

    def spec(self) -> dict[str, Any]:
        """Return the default spec with the CA's PEM in `fleet.ca`. Raises `FleetAuthorityMissing`."""
        if self._fleet_ca is None or "fleet" not in self._spec:
            return self._spec
        try:
            self._pem = self._fleet_ca.read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            if not self._pem:
                raise FleetAuthorityMissing(
                    f"the controller's authority cannot be read: {error}",
                    where=str(self._fleet_ca),
                    remedy="check that the controller runs, which issues it",
                ) from None
        return {**self._spec, "fleet": {**self._spec["fleet"], "ca": self._pem}}

    def has_store(self) -> bool:
        return "store" in self._spec

    def unready(self) -> list[str]:
        """Return why the spec is not available yet, or an empty list."""
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
            "the default policy is not an object", where=str(path), remedy="give it a policy's spec"
        )
    return document
