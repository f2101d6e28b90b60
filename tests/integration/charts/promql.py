"""Questions to Prometheus' own parser and engine (`tools/promql`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.tool import built

Samples = dict[str, list[tuple[float, float]]]
"""(time in seconds, value) by series, `name{label="value"}`."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an expression reads, and what it gives."""

    error: str
    metrics: list[str] = field(default_factory=list)
    result: list[tuple[dict[str, str], float]] = field(default_factory=list)


def ask(expressions: Sequence[str], series: Samples | None = None, *, at_s: float = 0.0) -> list[Answer]:
    """What each expression gives over the samples, at one time."""
    questions = [{"expression": each, "series": series or {}, "at": at_s} for each in expressions]
    done = subprocess.run(
        [str(built("promql"))],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        Answer(
            error=each["error"],
            metrics=each["metrics"] or [],
            result=[(given["labels"], given["value"]) for given in each["result"] or []],
        )
        for each in answers
    ]
