"""Kubernetes quantities (`1500m`, `1.5Gi`, `2e9`) as exact numbers, and back in a form a person would write.

The grammar is the API's: a decimal number, then a binary suffix (Ki to Ei), a decimal one (n u m k M G T P E) or a
decimal exponent. Bytes and millicores round up, as the API does.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,3}))?", re.ASCII
)
_UNITS = {
    **{letter: Fraction(1000) ** n for n, letter in enumerate(("n", "u", "m", "", *"kMGTPE"), start=-3)},
    **{f"{letter}i": Fraction(1024) ** n for n, letter in enumerate("KMGTPE", start=1)},
}


def parse(value: str | float) -> Fraction:
    """The number a quantity stands for; raises `ValueError` when it is none."""
    text = str(value)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    number, unit, exponent = match.groups(default="")
    return Fraction(number) * _UNITS[unit] * Fraction(10) ** int(exponent or 0)


def bytes_of(value: str | float) -> int:
    """Bytes, rounded up."""
    return math.ceil(parse(value))


def format_bytes(n: int) -> str:
    """Bytes in the largest binary unit that divides them."""
    for shift, suffix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if n and n % (1 << shift) == 0:
            return f"{n >> shift}{suffix}"
    return str(n)


def format_millis(n: int) -> str:
    """Millicores, whole cores without the `m`."""
    return str(n // 1000) if n % 1000 == 0 else f"{n}m"
