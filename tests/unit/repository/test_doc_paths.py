"""Pages about the code name only existing files, tests, classes and functions."""

from __future__ import annotations

import re

import pytest

from tests.support.tool import ROOT

WALK = (ROOT / "docs" / "how-it-works.md").read_text()
PATH = re.compile(
    r"`((?:trainer|sidecar|checkpoint|operator|cli|proto|charts|tests|bench|docs)/[\w./-]+)(?:::(\w+))?"
)
STOP = re.compile(r"^\| *\d+ \| `([^`]+)` · `([\w.]+)` \|", re.MULTILINE)


@pytest.mark.parametrize(
    "page", sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
)
def test_every_path_on_a_page_exists(page: str) -> None:
    wrong = []
    for path, test in PATH.findall((ROOT / "docs" / page).read_text()):
        place = ROOT / path
        if not place.exists() or (test and f"def {test}" not in place.read_text()):
            wrong.append(f"{path}::{test}")
    assert wrong == []


def test_every_stop_of_the_walk_exists() -> None:
    stops = STOP.findall(WALK)
    assert 20 < len(stops) < 30
    for path, name in stops:
        source = (ROOT / path).read_text()
        for part in name.split("."):
            assert re.search(rf"^ *(?:async )?(?:def|class) {part}\b", source, re.MULTILINE), (
                f"{path}: {name}"
            )


def test_every_page_of_docs_is_linked() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    navigation = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    linked = {ROOT / "docs" / page for page in navigation}
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            to = (page.parent / target).resolve()
            linked.add(to / "README.md" if to.is_dir() else to)
    assert [str(page.relative_to(ROOT)) for page in pages[1:] if page.resolve() not in linked] == []
