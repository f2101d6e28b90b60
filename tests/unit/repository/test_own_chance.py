"""The global generators are the program's: what the library draws from them changes the bits of a training."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OF_THE_LIBRARY = sorted(
    path
    for folder in ("trainer/deltashard", "checkpoint/deltashard_checkpoint", "proto/deltashard_proto")
    for path in (ROOT / folder).rglob("*.py")
)
KEEPS = {"Random", "SystemRandom", "getstate", "setstate"}
"""What draws nothing from `random`'s global generator; `seed` is `rng.draw_apart`'s, for a rank that has none."""


def _drawn(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="random"), attr=name) if name not in KEEPS:
                yield f"random.{name}, line {node.lineno}"
            case ast.ImportFrom(module="random", names=names):
                yield from (f"from random import {n.name}" for n in names if n.name not in KEEPS)


@pytest.mark.parametrize("path", OF_THE_LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_draws_from_pythons_generator(path: Path) -> None:
    found = list(_drawn(path.read_text()))
    if path.name == "rng.py":
        found = [each for each in found if not each.startswith("random.seed")]
    assert found == []


def test_a_module_that_draws_is_found() -> None:
    assert list(_drawn("import random\nx = random.random()\n")) == ["random.random, line 2"]
    assert list(_drawn("from random import choice, Random")) == ["from random import choice"]
