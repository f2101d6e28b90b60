"""Names in documentation pages exist."""

from __future__ import annotations

import re

from tests.cluster.scenario import page as pages
from tests.support.server.minio_server import ROOT


def test_kubernetes_pages_name_existing_files_and_clients() -> None:
    """The commands name existing files and clients that the runner provides."""
    found = [
        path for path in sorted((ROOT / "docs" / "kubernetes").glob("*.md")) if "```sh" in path.read_text()
    ]
    assert "ten-minutes.md" in {path.name for path in found}
    for path in found:
        for step in pages.read(path.read_text()):
            for name in re.findall(r"-f (\S+)", step.commands):
                assert (ROOT / name).exists(), f"{path.name}:{step.line}: {name}"


def test_incidents_page_names_existing_tests() -> None:
    """Each file exists and has at least one test of each name, which may end in a star."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+)(\*?))?`", (ROOT / "docs/incidents.md").read_text())
    assert len(named) > 20
    for file, name, star in named:
        text = (ROOT / file).read_text()
        assert re.search(rf"^def {name}{'' if star else r'[(]'}", text, re.MULTILINE) if name else text, (
            file,
            name,
        )
