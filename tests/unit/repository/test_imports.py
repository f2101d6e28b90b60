"""Tests stand alone: what two of them need is in tests/support or beside them, never in one of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.tool import ROOT


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_test_imports_another() -> None:
    """Nor a conftest: fixtures come by their names."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in _imported(path)
        if name.startswith("tests.")
        and any(part == "conftest" or part.startswith("test_") for part in name.split("."))
        and (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
    ]
    assert found == []
