"""The page on the sidecar's settings."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import fields

from deltashard_checkpoint.vocabulary import CHOICES
from deltashard_sidecar import settings

from tools.reference_pages.markdown import document, head, table

NO_BOUND = {1 << 53, 366 * 86400}
"""A range that ends here has no upper bound for users."""


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
    assert [name for name, *_ in rows] == list(defaults), "a setting has no docstring"
    return rows


def page() -> str:
    return document(_lines())


def _lines() -> Iterator[str]:
    yield from head(
        "Sidecar settings",
        "For engineers who run the sidecar themselves, or pass `sidecar={...}` to a `Checkpointer`.",
        "sidecar/deltashard_sidecar/settings.py",
    )
    yield (
        "Every setting is a flag of `deltashard-sidecar serve` and an environment variable; the flag has priority. "
        "Sizes are bytes, or have a suffix (`64MiB`, `10GiB`)."
    )
    yield ""
    rows = []
    for name, kind, default, doc in entries():
        flag, variable = settings.flag_of(name), settings.variable_of(name)
        value = f"{kind.replace('|', 'or')}, {_default(name, default)}"
        low, high = settings.RANGES.get(name, (None, None))
        if low is not None and -low not in NO_BOUND:
            bound = f" to {_amount(name, high)}" if high not in NO_BOUND else " or more"
            value += f"\n{_amount(name, low)}{bound}"
        rows.append((f"`{flag}`\n`{variable}`", value, " ".join(doc.split())))
    yield from table(("flag and variable", "type, default, range", "meaning"), rows)


def _default(name: str, default: str) -> str:
    if default == "required":
        return default
    value = next(each.default for each in fields(settings.Settings) if each.name == name)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"`{_amount(name, value)}`"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return f"`{default}`"


def _amount(name: str, value: float) -> str:
    """Return a number in the form that a user writes."""
    if name.endswith("_bytes") and value:
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value % size == 0:
                return f"{int(value) // size}{unit}"
    return f"{value:.0f}" if value == int(value) else f"{value:g}"
