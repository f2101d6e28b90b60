"""What the pages read from the source: docstrings of attributes, sections of docstrings, calls."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def attribute_docs(owner: ModuleType | type) -> dict[str, str]:
    """Return the docstrings of a module's or class's attributes: the string literals after their assignments."""
    tree = ast.parse(inspect.getsource(owner))
    body = tree.body if isinstance(owner, ModuleType) else tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for node, following in itertools.pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(following, ast.Expr):
            found[target.id] = inspect.cleandoc(ast.literal_eval(following.value))
    return found


def raises(function: Any) -> dict[str, str]:
    """Return the section `Raises:` of a docstring: error -> when it is raised."""
    section = (inspect.getdoc(function) or "").partition("Raises:\n")[2].partition("\n\n")[0]
    entries = re.split(r"(?m)^    (?=\w+:)", section)[1:]
    return {name: " ".join(text.split()) for name, _, text in (each.partition(":") for each in entries)}


def calls(folder: Path) -> Iterator[ast.Call]:
    """Yield every call in the modules of a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield node


def strings(node: ast.AST) -> list[str]:
    """Return the string literals that an expression can evaluate to."""
    if isinstance(node, ast.IfExp):
        return strings(node.body) + strings(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
