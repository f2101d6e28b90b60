"""Renders docs/reference/sidecar-settings.md from the sidecar's settings: `python -m tools.settings_page`."""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import fields
from pathlib import Path

from deltashard_checkpoint.vocabulary import CHOICES
from deltashard_sidecar import settings

PAGE = Path(__file__).parents[1] / "docs/reference/sidecar-settings.md"


def entries() -> list[tuple[str, str, str, str]]:
    """Return (name, type, default, docstring) of every setting, read from its source."""
    node = ast.parse(inspect.getsource(settings))
    body = next(n for n in node.body if isinstance(n, ast.ClassDef) and n.name == "Settings").body
    defaults = {f.name: f.default for f in fields(settings.Settings)}
    rows = []
    for field, doc in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(doc, ast.Expr), f"{field.target.id} has no docstring"
            assert isinstance(doc.value, ast.Constant), f"{field.target.id} has no docstring"
            name = field.target.id
            value = field.value.args[0] if isinstance(field.value, ast.Call) else field.value
            default = "required" if value is None else ast.unparse(value)
            text = str(doc.value.value)
            if name in CHOICES:
                default = repr(defaults[name])
                *words, last = CHOICES[name]
                text = text.replace("{choices}", f"{', '.join(words)} or {last}")
            rows.append((name, ast.unparse(field.annotation), default, text))
    return rows


def reference() -> str:
    lines = [
        "# Sidecar settings",
        "",
        "Generated from `sidecar/deltashard_sidecar/settings.py`; do not edit.",
        "",
        "| flag | variable | type | default | range | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for name, kind, default, doc in entries():
        meaning = " ".join(doc.split()).replace("|", "\\|")
        flag, variable = settings.flag_of(name), settings.variable_of(name)
        span = " to ".join(str(int(limit)) for limit in settings.RANGES.get(name, ()))
        typed = kind.replace("|", "or")
        lines.append(f"| `{flag}` | `{variable}` | {typed} | `{default}` | {span} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference())
