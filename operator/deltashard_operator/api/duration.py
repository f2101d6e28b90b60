"""Durations in policies, annotations and requests: `90s`, `5m`, `1h30m`, as in Kubernetes."""

from __future__ import annotations

import re

from deltashard_checkpoint.deciding import goal

PATTERN = "([0-9]{1,5}(h|m|s|ms)){1,4}"
_UNITS_MS = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}


def seconds_of(text: object) -> float:
    """Return the seconds of a duration. Raises `ValueError`."""
    if not isinstance(text, str) or not re.fullmatch(PATTERN, text, re.ASCII):
        raise ValueError(f"{str(text)[:80]!r} is not a duration such as 90s, 5m or 1h30m")
    return (
        sum(int(number) * _UNITS_MS[unit] for number, unit in re.findall("([0-9]+)(h|ms|m|s)", text)) / 1000
    )


def parse_goal(text: str) -> str:
    """Return a goal in the sidecar's form, with a single time unit. Raises `ValueError`."""
    goal_name, _, amount = text.partition("=")
    goal_text = text
    if goal_name == "lost-work":
        whole = round(seconds_of(amount) * 1000)
        unit = next(unit for unit, length in _UNITS_MS.items() if whole % length == 0)
        goal_text = f"{goal_name}={whole // _UNITS_MS[unit]}{unit}"
    try:
        goal.goal(goal_text)
    except goal.BadGoal as error:
        raise ValueError(error.what) from None
    return goal_text
