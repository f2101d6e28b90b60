"""The global random generators belong to the program: the library must not draw from them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
ALLOWED = {"Random", "SystemRandom", "getstate", "setstate"}
"""Names of `random` that draw nothing from its global generator. Only `rng.reseed_for_rank` may use `seed`."""


def _drawn(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="random"), attr=name) if name not in ALLOWED:
                if (path.name, name) != ("rng.py", "seed"):
                    yield f"{path}, line {node.lineno}: random.{name}"
            case ast.ImportFrom(module="random", names=names):
                yield from (f"{path}: {n.name} of random" for n in names if n.name not in ALLOWED)


def test_no_module_uses_the_global_random_generator() -> None:
    folders = "trainer/deltashard", "checkpoint/deltashard_checkpoint", "proto/deltashard_proto"
    found = [each for folder in folders for path in (ROOT / folder).rglob("*.py") for each in _drawn(path)]
    assert found == []
