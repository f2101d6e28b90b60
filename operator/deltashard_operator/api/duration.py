"""The one spelling of a time span in policies, annotations and requests: `90s`, `5m`, `1h30m`, as Kubernetes has it."""

from __future__ import annotations

import re

from deltashard_checkpoint.deciding import goal

PATTERN = "([0-9]{1,5}(h|m|s|ms)){1,4}"
_WHOLE = re.compile(PATTERN, re.ASCII)
_PART = re.compile("([0-9]+)(h|ms|m|s)", re.ASCII)
_UNITS_MS = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}


def seconds_of(text: object) -> float:
    """Seconds of a duration; raises `ValueError`."""
    if not isinstance(text, str) or not _WHOLE.fullmatch(text):
        raise ValueError(f"{str(text)[:80]!r} is no duration such as 90s, 5m or 1h30m")
    return sum(int(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text)) / 1000


def text_of(seconds: float) -> str:
    """A number of seconds as a duration of one unit, to the millisecond."""
    whole = round(seconds * 1000)
    unit = next(unit for unit, length in _UNITS_MS.items() if whole % length == 0)
    return f"{whole // _UNITS_MS[unit]}{unit}" if whole else "0s"


def goal_of(text: str) -> str:
    """A goal as the sidecar takes it, whose time is of one unit; raises `ValueError`."""
    aim, _, amount = text.partition("=")
    said = f"{aim}={text_of(seconds_of(amount))}" if aim == "lost-work" else text
    try:
        goal.goal(said)
    except goal.BadGoal as error:
        raise ValueError(error.what) from None
    return said
