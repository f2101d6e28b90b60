"""Names shared by all components: encodings, differentials and protocol versions, and their parsing.

Policies, annotations, settings, arguments, frames and generated pages take their names from this module. It imports
only the errors, so that users of a name do not load the codecs. `tests/unit/checkpoint/test_vocabulary.py` compares it
with the files that cannot import Python (custom resources, chart schema, protocol comments).

Codes are part of the format: add codes, never renumber them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from deltashard_checkpoint.errors import UserError


class UnknownName(UserError):
    """The name of an encoding or a differential is unknown."""


# Encodings of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """A storage encoding of weight rows; `codecs.encoding` defines its layout."""

    name: str
    code: int
    """Number in a frame's header."""
    bits: int
    """Bits per value."""
    dtype: str | None
    """Dtype of the stored weights for raw encodings; None for quantized ones."""
    scale_bytes: int
    """Bytes of one scale and of one bias."""

    @property
    def quantized(self) -> bool:
        return self.dtype is None

    @property
    def qmax(self) -> int:
        return (1 << self.bits) - 1

    def row_code_bytes(self, columns: int) -> int:
        """Bytes of one row's codes (its values, for a raw encoding)."""
        return -(-columns * self.bits // 8)


ENCODINGS: Mapping[str, Encoding] = {
    e.name: e
    for e in (
        Encoding(name="fp32", code=1, bits=32, dtype="float32", scale_bytes=0),
        Encoding(name="fp16", code=2, bits=16, dtype="float16", scale_bytes=0),
        Encoding(name="bf16", code=3, bits=16, dtype="bfloat16", scale_bytes=0),
        Encoding(name="fp64", code=4, bits=64, dtype="float64", scale_bytes=0),
        Encoding(name="q8", code=5, bits=8, dtype=None, scale_bytes=4),
        Encoding(name="q4", code=6, bits=4, dtype=None, scale_bytes=2),
        Encoding(name="q3", code=7, bits=3, dtype=None, scale_bytes=2),
        Encoding(name="q2", code=8, bits=2, dtype=None, scale_bytes=2),
    )
}
"""Every encoding that a frame may have, by name."""

ENCODING_OF_CODE: Mapping[int, Encoding] = {e.code: e for e in ENCODINGS.values()}
"""`ENCODINGS` by code."""

ENCODING_CHOICES: tuple[str, ...] = tuple(name for name in ENCODINGS if name != "fp64")
"""Encodings that a user may choose. fp64 is not one: it stores float64 tables under fp32."""

BITS_CHOICES: Mapping[int, str] = {2: "q2", 3: "q3", 4: "q4", 8: "q8", 16: "bf16", 32: "fp32"}
"""Bits per stored weight, the alternative way to choose, and the resulting encoding."""

DEFAULT_ENCODING = "q8"


def encoding_named(name: str) -> Encoding:
    """Return the `Encoding` named `name`; raises `UnknownName`."""
    encoding = ENCODINGS.get(name)
    if encoding is None:
        raise UnknownName(f"unknown encoding {name!r}", remedy=f"one of {', '.join(ENCODINGS)}")
    return encoding


def bits_of(name: str) -> int | None:
    """Return the bits per weight of the named encoding; None if this version does not know the name."""
    encoding = ENCODINGS.get(name)
    return None if encoding is None else encoding.bits


# Encodings of optimizer state

StateEncoding = Literal["fp32", "bf16"]
STATE_ENCODINGS: tuple[StateEncoding, ...] = get_args(StateEncoding)
"""fp32 stores all state unchanged; bf16 narrows point-wise float32 fields, never row-wise ones."""
DEFAULT_STATE_ENCODING: StateEncoding = "fp32"


def stored_state_dtype(state_encoding: str, *, pointwise: bool, dtype: str) -> str:
    """Return the dtype in which an optimizer-state field is stored; raises `UnknownName`."""
    if state_encoding not in STATE_ENCODINGS:
        raise UnknownName(
            f"unknown state encoding {state_encoding!r}", remedy=f"one of {', '.join(STATE_ENCODINGS)}"
        )
    return "bfloat16" if state_encoding == "bf16" and pointwise and dtype == "float32" else dtype


# Differentials: the rows that a save contains (`write.differential` defines them)

Differential = Literal["full", "one-shot", "consecutive", "intermittent"]
DIFFERENTIALS: tuple[Differential, ...] = get_args(Differential)
DEFAULT_DIFFERENTIAL: Differential = "intermittent"
COVERS_NEWEST: frozenset[str] = frozenset(("consecutive", "full"))
"""Under these differentials a following delta covers the newest checkpoint."""


def differential_named(name: str) -> Differential:
    """Return the differential named `name`; raises `UnknownName`."""
    for differential in DIFFERENTIALS:
        if differential == name:
            return differential
    raise UnknownName(f"unknown differential policy {name!r}", remedy=f"one of {', '.join(DIFFERENTIALS)}")


# Rules by which bits are chosen

BITS_RULES = ("budget", "check-n-run")
NO_BITS_RULE = "fixed"
BITS_GOALS = ("", *BITS_RULES, NO_BITS_RULE)
"""Empty and "fixed": bits are not chosen. In a directive, empty keeps the pod's start-up setting."""


CHOICES: Mapping[str, tuple[str, ...]] = {
    "bits_goal": BITS_GOALS,
    "encoding": ENCODING_CHOICES,
    "state_encoding": STATE_ENCODINGS,
    "differential": DIFFERENTIALS,
}
"""Setting -> its allowed values."""

# Versions of the protocols


class ProtocolVersions(NamedTuple):
    """The protocol versions that this side supports, both ends inclusive."""

    least: int
    most: int

    def common(self, least: int, most: int) -> int | None:
        """Return the newest version shared with a peer that supports `least` to `most`, or None."""
        newest = min(self.most, most)
        return newest if newest >= max(self.least, least) else None


TRAINER_PROTOCOL = ProtocolVersions(1, 1)
"""Between trainer and sidecar."""
FLEET_PROTOCOL = ProtocolVersions(1, 1)
"""Between sidecar and controller."""


ONE_RUN, RUN_PER_POD = "one", "per-pod"
"""What a workload's pods train: ranks of one run, or a separate run per numbered pod."""


# Metadata keys of a commit that deltashard reserves

PLS_KEY = "deltashard/pls"
"""The run's portion of lost samples; present after a partial recovery."""
RECOVERIES_KEY = "deltashard/partial-recoveries"
"""Number of partial recoveries."""
INCREMENTS_KEY = "deltashard/increments"
"""For a delta over a baseline: the baseline and the sizes of the preceding increments (`write.differential`)."""
ORDERS_KEY = "deltashard/orders"
"""Space-separated ids of the save orders that this commit fulfils."""
PRECISION_KEY = "deltashard/precision"
"""The coarsest encodings in which a row of the checkpoint may be stored (`write.precision`)."""
INCONSISTENT_KEY = "deltashard/inconsistent"
"""Earlier checkpoints ("seq:4,seq:5") in which rows of another step were found."""
LINEAGE_KEY = "deltashard/lineage"
"""Present in every commit of a run under partial recovery."""
