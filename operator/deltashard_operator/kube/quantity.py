"""Kubernetes quantities (`1500m`, `1.5Gi`, `2e9`) as exact numbers, and their canonical text.

The grammar is the API's: a decimal number followed by a binary suffix (Ki to Ei), a decimal suffix (n u m k M G T P E)
or a decimal exponent. Bytes and millicores are rounded up, as in the API.
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
    """Parse a quantity. Raises `ValueError` if it is invalid."""
    text = str(value)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    number, unit, exponent = match.groups(default="")
    return Fraction(number) * _UNITS[unit] * Fraction(10) ** int(exponent or 0)


def bytes_of(value: str | float) -> int:
    """Parse a quantity of bytes, rounded up."""
    return math.ceil(parse(value))


def format_bytes(n: int) -> str:
    for shift, suffix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if n and n % (1 << shift) == 0:
            return f"{n >> shift}{suffix}"
    return str(n)


def format_millis(n: int) -> str:
    """Format millicores; whole cores without the `m`."""
    return str(n // 1000) if n % 1000 == 0 else f"{n}m"
