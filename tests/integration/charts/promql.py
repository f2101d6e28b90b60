"""Evaluation of PromQL with Prometheus' own parser and engine (`tools/promql`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.tool import require_tool

Samples = dict[str, list[tuple[float, float]]]
"""(time in seconds, value) by series, `name{label="value"}`."""


@dataclass(frozen=True, kw_only=True)
class PromqlResult:
    """The metrics that an expression reads and the values that it returns."""

    error: str
    metrics: list[str] = field(default_factory=list)
    result: list[tuple[dict[str, str], float]] = field(default_factory=list)


def evaluate(
    expressions: Sequence[str], series: Samples | None = None, *, at_s: float = 0.0
) -> list[PromqlResult]:
    return _evaluate([{"expression": each, "series": series or {}, "at": at_s} for each in expressions])


def evaluate_at(expression: str, series: Samples, times_s: Sequence[float]) -> list[PromqlResult]:
    return _evaluate([{"expression": expression, "series": series, "at": at_s} for at_s in times_s])


def evaluate_rules(rules: Sequence[tuple[str, str]], series: Samples, times_s: Sequence[float]) -> Samples:
    """Return the samples plus the series that the recording rules (name, expression) produce.

    Each rule reads the series of the rules before it.
    """
    found = dict(series)
    for name, expression in rules:
        for at_s, answer in zip(times_s, evaluate_at(expression, found, times_s), strict=True):
            assert answer.error == "", (name, answer.error)
            for labels, value in answer.result:
                selector = ",".join(
                    f'{key}="{text}"' for key, text in sorted(labels.items()) if key != "__name__"
                )
                found.setdefault(f"{name}{{{selector}}}", []).append((at_s, value))
    return found


def _evaluate(questions: Sequence[object]) -> list[PromqlResult]:
    done = subprocess.run(
        [str(require_tool("promql"))],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        PromqlResult(
            error=each["error"],
            metrics=each["metrics"] or [],
            result=[(given["labels"], given["value"]) for given in each["result"] or []],
        )
        for each in answers
    ]
