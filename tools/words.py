"""Rejects the words of words.toml: `make lint` runs it over every text file that git tracks.

A word counts in prose, in strings and as a part of an identifier (`word_of`, `lastWord`). `[left]` is how many each
top-level folder still has; the numbers may only shrink. `--list FOLDER` prints each place in the folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".pyi", ".c", ".proto", ".md", ".yaml", ".yml", ".tpl", ".toml")
SKIPPED = re.compile(r"^(uv\.lock|tools/words\.toml|tests/golden/|changes/)|_pb2")


def pattern(words: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches one of `words` as a whole word or a whole part of an identifier."""
    whole = "|".join(f"[{word[0]}{word[0].upper()}]{re.escape(word[1:])}" for word in words)
    hump = "|".join(re.escape(word.capitalize()) for word in words)
    return re.compile(rf"(?<![a-z])(?:{whole})(?![a-z])|(?<=[a-z])(?:{hump})(?![a-z])")


def places(words: list[str]) -> dict[str, list[str]]:
    """Return `path:line: word` of every match, by the path's first folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S607
    rejected = pattern(words)
    found: dict[str, list[str]] = defaultdict(list)
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if not name.endswith(SUFFIXES) or SKIPPED.search(name) or not path.is_file():
            continue
        folder = name.split("/")[0] if "/" in name else "."
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found[folder] += [f"{name}:{number}: {match[0]}" for match in rejected.finditer(line)]
    return found


def main(arguments: list[str]) -> int:
    """Return 1 and print every breach with its remedy, or return 0."""
    rules = tomllib.loads((ROOT / "tools/words.toml").read_text())
    found = places(list(rules["instead"]))
    if arguments[:1] == ["--list"]:
        for place in found[arguments[1]]:
            print(place, "->", rules["instead"][place.rsplit(": ", 1)[1].lower()])  # noqa: T201
        return 0
    failed = False
    for folder in sorted(found.keys() | rules["left"].keys()):
        count, allowed = len(found[folder]), rules["left"].get(folder, 0)
        if count == allowed:
            continue
        failed = True
        if count > allowed:
            remedy = f"reword them (`tools/words.py --list {folder}`)"
        else:
            remedy = "lower the number in tools/words.toml"
        print(f"words: {folder} has {count}, listed are {allowed}: {remedy}", file=sys.stderr)  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
