"""A parser for the parts of a Dockerfile that the tests check."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStage:
    """One FROM instruction and the instructions after it."""

    name: str
    base: str
    """An image or the name of an earlier stage, with arguments substituted."""
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [text for word, text in self.instructions if word == keyword]


def read(path: Path) -> dict[str, BuildStage]:
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text())
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip()]
    arguments: dict[str, str] = {}
    stages: dict[str, BuildStage] = {}
    current = None
    for line in lines:
        keyword, _, rest = line.partition(" ")
        rest = rest.strip()
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            base = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], base)
            current = stages[name] = BuildStage(name=name, base=base)
        elif current is None:
            assert keyword == "ARG", line
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            current.instructions.append((keyword, rest))
    return stages


def lineage(stages: dict[str, BuildStage], name: str) -> list[BuildStage]:
    stage = stages[name]
    return [*(lineage(stages, stage.base) if stage.base in stages else []), stage]


def last(stages: list[BuildStage], keyword: str) -> str | None:
    """Return the last instruction of the kind. An ENTRYPOINT of a base image has no effect here."""
    found = [text for stage in stages for text in stage.all(keyword)]
    return found[-1] if found else None


def arguments(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(json.loads(text))


def variables(stages: list[BuildStage]) -> dict[str, str]:
    return {
        name: value
        for stage in stages
        for text in stage.all("ENV")
        for name, value in re.findall(r"(\w+)=(\S+)", text)
    }
