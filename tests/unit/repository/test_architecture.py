"""Drawings and lists on the pages of the site agree with the code."""

from __future__ import annotations

import ast
import re
import tomllib

import deltashard

from tests.support.tool import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = {
    "trainer": "deltashard",
    "checkpoint": "deltashard_checkpoint",
    "sidecar": "deltashard_sidecar",
    "operator": "deltashard_operator",
    "cli": "deltashard_cli",
    "proto": "deltashard_proto",
}


def imported(folder: str) -> set[str]:
    folders = {package: name for name, package in PACKAGES.items()}
    found = set()
    for path in (ROOT / folder / PACKAGES[folder]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            found |= {folders[name.split(".")[0]] for name in names if name.split(".")[0] in folders}
    return found - {folder}


def test_drawn_arrows_are_the_imports() -> None:
    drawing = re.findall(r"^  (\w+) --> (\w+)$", PAGE.split("## Packages")[1], re.MULTILINE)
    assert set(drawing) == {(folder, other) for folder in PACKAGES for other in imported(folder)}


def test_every_package_and_entry_point_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    scripts = set(project["project"]["scripts"]) - {"deltashard-chart-test"}
    listed = set(re.findall(r"`([\w-]+)`", PAGE.split("## Processes")[1].split("## Packages")[0]))
    assert scripts <= listed
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("## Packages")[1], re.MULTILINE)
    assert sorted(rows) == sorted(PACKAGES)


def test_api_page_lists_every_public_name() -> None:
    listed = re.findall(
        r"^::: deltashard\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE
    )
    inherited = {"DeltashardError", "FencedError", "SaveFailed"}  # in deltashard.errors
    assert sorted({*listed, *inherited}) == sorted(deltashard.__all__)
