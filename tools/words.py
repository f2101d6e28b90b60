"""Rejects the words of words.toml: `make lint` runs it over every text file that git tracks.

A word counts in prose, in strings and as a part of an identifier (`word_of`, `lastWord`). `[left]` is how many each
top-level folder still has; the numbers may only shrink. `--list FOLDER` prints each place in the folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".pyi", ".c", ".proto", ".md", ".yaml", ".yml", ".tpl", ".toml")
SKIPPED = re.compile(r"^(uv\.lock|tools/words\.toml|tests/golden/|changes/)|_pb2")


def pattern(words: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches one of `words` as a whole word or a whole part of an identifier."""
    whole = "|".join(f"[{word[0]}{word[0].upper()}]{re.escape(word[1:])}" for word in words)
    hump = "|".join(re.escape(word.capitalize()) for word in words)
    return re.compile(rf"(?<![a-z])(?:{whole})(?![a-z])|(?<=[a-z])(?:{hump})(?![a-z])")


def places(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (`path:line`, word) of every match."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S607
    rejected = pattern(words)
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if not name.endswith(SUFFIXES) or SKIPPED.search(name) or not path.is_file():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in rejected.finditer(line):
                yield f"{name}:{number}", match[0]


def main() -> int:
    """Return 1 and print every breach with its remedy, or return 0."""
    instead = tomllib.loads((ROOT / "tools/words.toml").read_text())["instead"]
    found = list(places(list(instead)))
    for place, word in found:
        print(f"{place}: {word!r} is rejected, write: {instead[word.lower()]}", file=sys.stderr)  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
