"""Quantities as people write them: 400GiB, 26%@30m, 1e9x64x4. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from deltashard_checkpoint.deciding.goal import BadGoal, duration, duration_s
from deltashard_checkpoint.errors import UserError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGTP]i?)?B?(?:/s)?", re.ASCII)
_POWERS = {"k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)%", re.ASCII)
_COUNT = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?", re.ASCII)


class BadQuantity(UserError):
    """A quantity that cannot be read."""


class Model(NamedTuple):
    """The rows of all tables together."""

    rows: int
    columns: int
    state_bytes: int
    """Of optimizer state, a row."""


def size_bytes(text: str, *, where: str) -> float:
    """Bytes of a size (400GiB, 2TB) or of a bandwidth (500MB/s); raises `BadQuantity`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise BadQuantity(f"{text[:40]!r} is no size", where=where, remedy="such as 400GiB, 2TB or 500MB/s")
    unit = found[2] or ""
    power = _POWERS[unit[0]] if unit else 0
    value = float(found[1]) * (1024.0 if unit.endswith("i") else 1000.0) ** power
    if not 0 < value <= 1e18:
        raise BadQuantity(
            f"{text[:40]!r} is out of range", where=where, remedy="more than 0, at most an exabyte"
        )
    return value


def model(text: str, *, where: str) -> Model:
    """What is meant by rows x columns x bytes of state a row; raises `BadQuantity`."""
    parts = [part.strip() for part in text.lower().split("x")]
    if len(parts) in {2, 3} and all(_COUNT.fullmatch(part) for part in parts):
        rows, columns, state_bytes = (float(part) for part in [*parts, "4"][:3])
        if 1 <= rows <= 1e13 and 1 <= columns <= 65536 and state_bytes <= 1e6:
            return Model(rows=round(rows), columns=round(columns), state_bytes=round(state_bytes))
    raise BadQuantity(
        f"{text[:40]!r} is no model",
        where=where,
        remedy="rows x columns x bytes of optimizer state a row, such as 1e9x64x4",
    )


def seconds(text: str, *, where: str) -> float:
    """Of a duration above 0 and at most ten years; raises `BadQuantity`."""
    try:
        found = duration_s(text, where=where)
    except BadGoal as error:
        raise BadQuantity(error.what, where=where, remedy=error.remedy) from None
    if not 0 <= found <= 3650 * 86400:
        raise BadQuantity(f"{text[:40]!r} is out of range", where=where, remedy="at most ten years")
    return found


def dirty(text: str, interval_s: float, *, where: str) -> tuple[float, float]:
    """(seconds, share of rows touched within them) of 26%@30m, or of 26% within `interval_s`; raises `BadQuantity`."""
    share, at, span = text.strip().partition("@")
    found = _SHARE.fullmatch(share.strip())
    value = float(found[1]) / 100 if found else math.nan
    if not 0 < value < 1:
        raise BadQuantity(
            f"{text[:40]!r} is no share of rows", where=where, remedy="such as 26% or 26%@30m, below 100%"
        )
    span_s = seconds(span, where=where) if at else interval_s
    if span_s <= 0:
        raise BadQuantity(f"{text[:40]!r} is of no time", where=where, remedy="such as 26%@30m")
    return span_s, value


def growing(points: Sequence[tuple[float, float]], *, where: str) -> tuple[tuple[float, float], ...]:
    """The points (seconds, share) by time; raises `BadQuantity` where a longer time has touched fewer rows."""
    found = tuple(sorted(points))
    for (before_s, before), (after_s, after) in pairwise(found):
        if after < before or (after_s == before_s and after != before):
            shorter = f"{100 * before:g}% within {duration(before_s)}"
            raise BadQuantity(
                f"{100 * after:g}% of rows within {duration(after_s)}, but {shorter}",
                where=where,
                remedy="a longer time touches at least as many rows: 26%@30m and 34%@60m",
            )
    return found
