"""Checks the limits of budget.toml: lines of each package and module, class names that only one module may define.

Prints each breach with its remedy and exits with 1, or exits with 0 when all limits hold. Lines are those of .py and .c
files that git tracks, except code generated from proto/.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

GENERATED = "proto/deltashard_proto/v1/"


def tracked(root: Path) -> dict[str, int]:
    """Return each tracked source file in `root`, with its lines."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)  # noqa: S607
    names = [name for name in listed.stdout.split("\0") if name.endswith((".py", ".c"))]
    names = [name for name in names if not name.startswith(GENERATED) and (root / name).exists()]
    return {name: (root / name).read_bytes().count(b"\n") for name in names}


def shared_classes(root: Path, names: list[str]) -> dict[str, list[str]]:
    homes: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for node in ast.walk(ast.parse((root / name).read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(name)
    return {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}


def violations(root: Path) -> list[str]:
    """Return every breached limit as a sentence with its remedy."""
    limits = tomllib.loads((root / "tools/budget.toml").read_text())
    files = tracked(root)
    sizes = Counter[str]()
    for name, lines in files.items():
        sizes[name.split("/", 1)[0]] += lines
    found = [
        f"{package}: {sizes[package]} lines, its budget is {most}: remove some, or raise it and say why in the commit"
        for package, most in limits["lines"].items()
        if sizes[package] > most
    ]
    long = {name: lines for name, lines in files.items() if lines > limits["module_lines"]}
    for name, lines in long.items():
        entry = limits["long_modules"].get(name)
        if entry is None:
            found.append(
                f"{name}: {lines} lines, a module may have {limits['module_lines']}: split it by subject"
            )
        elif lines > entry["lines"]:
            found.append(
                f"{name}: {lines} lines, it is listed with {entry['lines']}: the list may only shrink"
            )
    gone = limits["long_modules"].keys() - long.keys()
    found += [
        f"{name}: is not that long any more: take it off the list of long modules" for name in sorted(gone)
    ]
    shared = shared_classes(root, [name for name in files if name.endswith(".py")])
    for name, modules in sorted(shared.items()):
        if name not in limits["shared_classes"]:
            found.append(f"class {name}: defined in {' and '.join(modules)}: give one of them another name")
    unused = set(limits["shared_classes"]) - shared.keys()
    found += [f"class {name}: only one module defines it: take it off the list" for name in sorted(unused)]
    return found


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    found = violations(root)
    for line in found:
        print(f"budget: {line}", file=sys.stderr)  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
