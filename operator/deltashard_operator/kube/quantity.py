"""Kubernetes quantities (`1500m`, `1.5Gi`, `2e9`) as exact numbers, and back in a form a person would write.

The grammar is the API's: a decimal number, then a binary suffix (Ki to Ei), a decimal one (n u m k M G T P E) or a
decimal exponent. Bytes and millicores round up, as the API does.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?[0-9]{1,3}))?", re.ASCII
)
_BINARY = {f"{letter}i": Fraction(1 << (10 * (n + 1))) for n, letter in enumerate("KMGTPE")}
_DECIMAL = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000)} | {
    letter: Fraction(10 ** (3 * (n + 1))) for n, letter in enumerate("kMGTPE")
}


def parse(value: str | float) -> Fraction:
    """The number a quantity stands for; raises `ValueError` when it is none."""
    text = str(value)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    number, binary, decimal, exponent = match.groups()
    factor = Fraction(1)
    if binary:
        factor = _BINARY[binary]
    elif decimal:
        factor = _DECIMAL[decimal]
    elif exponent:
        factor = Fraction(10) ** int(exponent)
    return Fraction(number) * factor


def bytes_of(value: str | float) -> int:
    """Bytes, rounded up."""
    return math.ceil(parse(value))


def millis_of(value: str | float) -> int:
    """Thousandths (millicores), rounded up."""
    return math.ceil(parse(value) * 1000)


def format_bytes(n: int) -> str:
    """Bytes in the largest binary unit that divides them."""
    for suffix in ("Gi", "Mi", "Ki"):
        unit = int(_BINARY[suffix])
        if n >= unit and n % unit == 0:
            return f"{n // unit}{suffix}"
    return str(n)


def format_millis(n: int) -> str:
    """Millicores, whole cores without the `m`."""
    return str(n // 1000) if n % 1000 == 0 else f"{n}m"
