"""The chart's default policy, and the controller's authority beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from deltashard_operator.api.chart_defaults import BadDefaults, Defaults, FleetAuthorityMissing

from tests.support.operator import sample


def defaults(folder: Path, content: object, fleet_ca: Path | None = None) -> Defaults:
    path = folder / "policy.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return Defaults(path, fleet_ca)


def test_the_file_is_the_spec(tmp_path: Path) -> None:
    """Nothing is added to it; without a file there is nothing under the policies."""
    assert defaults(tmp_path, sample.DEFAULTS).spec() == sample.DEFAULTS
    assert Defaults(None, None).spec() == {}
    assert not Defaults(None, None).has_store()


def test_the_authority_is_read_again_when_it_changed(tmp_path: Path) -> None:
    """Rotation reaches the next admission; a file that vanishes leaves what was read; one that never was is said."""
    ca = tmp_path / "ca.crt"
    found = defaults(tmp_path, sample.DEFAULTS, ca)
    with pytest.raises(FleetAuthorityMissing, match="is the controller running"):
        found.spec()
    assert "cannot be read" in found.unready()[0]
    ca.write_text("first")
    assert found.unready() == []
    assert found.spec()["fleet"] == {**sample.DEFAULTS["fleet"], "ca": "first"}
    ca.write_text("second, longer")
    assert found.spec()["fleet"]["ca"] == "second, longer"
    ca.unlink()
    assert found.spec()["fleet"]["ca"] == "second, longer"


@pytest.mark.parametrize("content", ["- a", "{", ""])
def test_what_is_no_object_is_refused_at_the_start(tmp_path: Path, content: str) -> None:
    """Not at the first admission."""
    with pytest.raises(BadDefaults, match="default policy"):
        defaults(tmp_path, content)
    with pytest.raises(BadDefaults, match="cannot be read"):
        Defaults(tmp_path / "missing.yaml", None)
