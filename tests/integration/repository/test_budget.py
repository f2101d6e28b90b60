"""tools/budget.py: each limit is found broken by the smallest change that breaks it, and holds before that change."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("budget", Path(__file__).parents[3] / "tools/budget.py")
assert _SPEC is not None
assert _SPEC.loader is not None
budget = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(budget)

LIMITS = """
unique_classes_in = ["cli", "trainer"]
shared_classes = ["Reader"]
module_lines = 5
[lines]
cli = 9
trainer = 20
[long_modules]
"trainer/long.py" = { lines = 6, reason = "one table" }
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository within its limits."""
    for name, text in {
        "tools/budget.toml": LIMITS,
        "cli/read.py": "class Reader:\n    pass\n",
        "trainer/read.py": "class Reader:\n    pass\n",
        "trainer/long.py": "x = 1\n" * 6,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert breaches(tmp_path) == []
    return tmp_path


def breaches(tree: Path) -> list[str]:
    subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    return budget.breaches(tree)


@pytest.mark.parametrize(
    ("name", "text", "breach"),
    [
        ("cli/more.c", "int x;\n" * 6, "cli/more.c: 6 lines"),
        ("cli/write.py", "a = 1\n" * 8, "cli: 10 lines, its budget is 9"),
        ("trainer/long.py", "x = 1\n" * 7, "trainer/long.py: 7 lines, it is listed with 6"),
        ("trainer/long.py", "x = 1\n" * 5, "trainer/long.py: is not that long any more"),
        ("trainer/write.py", "class Writer:\n    class Reader:\n        pass\n", None),
        ("cli/write.py", "class Writer:\n    pass\n", None),
        ("trainer/read.py", "x = 1\n", "class Reader: only one module defines it"),
    ],
)
def test_breach_is_named_with_its_remedy(tree: Path, name: str, text: str, breach: str | None) -> None:
    (tree / name).write_text(text)
    found = breaches(tree)
    assert any(line.startswith(breach) for line in found) if breach else found == []


def test_class_of_two_modules_is_a_breach_unless_listed(tree: Path) -> None:
    for package in ("cli", "trainer"):
        (tree / package / "write.py").write_text("class Writer:\n    pass\n")
    assert breaches(tree) == [
        "class Writer: defined in cli/write.py and trainer/write.py: give one of them another name"
    ]
