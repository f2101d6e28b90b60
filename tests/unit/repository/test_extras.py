"""Each extra of the package has exactly what its code imports; what all parts import is in the base."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import deltashard_cli
import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores import cloud, s3

from tests.support.tool import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
S3, CLOUD, KUBECTL = (
    "checkpoint/deltashard_checkpoint/stores/s3",
    "checkpoint/deltashard_checkpoint/stores/cloud",
    "cli/deltashard_cli/kubectl",
)
FOLDERS = {
    "trainer": ("trainer", "checkpoint"),
    "sidecar": ("sidecar", "checkpoint"),
    "cli": ("cli", "checkpoint"),
    "operator": ("operator",),
    "s3": (S3,),
    "cloud": (CLOUD,),
    "kubectl": (KUBECTL,),
}
OPTIONAL_EXTRAS = {S3, CLOUD, KUBECTL}
"""Folders whose imports belong to their own extras."""
ELSEWHERE = {"torch"}
"""Imports of the commands on torch's formats, which report a missing package."""


def names(requirements: list[str]) -> set[str]:
    """Return the distributions of extras, with those of the extras that they refer to."""
    found = set()
    for each in requirements:
        name, more = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?[^\[]*", each).groups()  # type: ignore[union-attr]
        found |= {name} if name != "deltashard" else names([n for e in more.split(",") for n in EXTRAS[e]])
    return found


BASE = names(PROJECT["project"]["dependencies"])
DISTRIBUTIONS = packages_distributions()


@cache
def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def needed(folders: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if not any(path.is_relative_to(ROOT / each) for each in OPTIONAL_EXTRAS - {*folders}):
            found |= imported(path)
    tops = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
    foreign = {top for top in tops if not top.startswith("deltashard")}
    return {DISTRIBUTIONS[top][0].lower().replace("_", "-") for top in foreign}


@pytest.mark.parametrize("extra", FOLDERS)
def test_extra_installs_what_its_code_imports(extra: str) -> None:
    brought, imports = names(EXTRAS[extra]), needed(FOLDERS[extra])
    assert imports - BASE - brought <= ELSEWHERE
    own = [each for each in EXTRAS[extra] if not each.startswith("deltashard")]
    assert names(own) <= imports, "installed but not imported"


def test_base_dependencies_are_the_common_imports() -> None:
    assert needed(("proto", "checkpoint")) >= BASE
    assert not BASE & {name for extra in FOLDERS for name in names(EXTRAS[extra])}


def test_missing_packages_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    for store, extra in ((s3, "s3"), (cloud, "cloud")):
        with pytest.raises(UserError, match="needs? the packages certifi, ") as caught:
            importlib.reload(store)
        assert f"deltashard[{extra}]" in caught.value.remedy
    with pytest.raises(SystemExit, match=re.escape("deltashard[cli]")):
        importlib.reload(deltashard_cli)
