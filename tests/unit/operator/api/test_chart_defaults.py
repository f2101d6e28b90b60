"""The chart's default policy and the controller's certificate authority."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from deltashard_operator.api.chart_defaults import BadDefaults, Defaults, FleetAuthorityMissing

from tests.support.operator import sample


def test_authority_is_reloaded_on_change(tmp_path: Path) -> None:
    """The next admission uses the new authority. It stays if the file disappears; a missing file is reported."""
    ca, policy = tmp_path / "ca.crt", tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(sample.DEFAULTS))
    found = Defaults(policy, ca)
    with pytest.raises(FleetAuthorityMissing, match="check that the controller runs"):
        found.spec()
    assert "cannot be read" in found.unready()[0]
    for text in ("first", "second"):
        ca.write_text(text)
        assert found.unready() == []
        assert found.spec() == sample.DEFAULTS | {"fleet": sample.DEFAULTS["fleet"] | {"ca": text}}
    ca.unlink()
    assert found.spec()["fleet"]["ca"] == "second"


@pytest.mark.parametrize("content", ["- a", "{", "", None])
def test_invalid_defaults_are_refused_at_startup(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "policy.yaml").write_text(content)
    with pytest.raises(BadDefaults, match="the default policy"):
        Defaults(tmp_path / "policy.yaml", None)
