"""The words that all parts share: encodings, differentials, versions of the protocols, and their parsing.

Policies, annotations, settings, arguments, frames and the pages made from them take their names from here, and this
module imports nothing but the errors, so whoever needs a name does not load the codecs. What cannot import Python (the
custom resources, the chart's schema, the comments of the protocol) is compared with it by
`tests/unit/checkpoint/test_vocabulary.py`.

Codes are part of the format: never renumbered, only added to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from deltashard_checkpoint.errors import UserError


class UnknownName(UserError):
    """A name that stands for nothing here: an encoding, a differential."""


# Encodings of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """One way to store weight rows; `codecs.encoding` has the layout."""

    name: str
    code: int
    """Number on the store, in a frame's header."""
    bits: int
    """Bits per value."""
    dtype: str | None
    """Weight dtype held, for raw encodings; None for quantized ones."""
    scale_bytes: int
    """Bytes of one scale, and of one bias."""

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
"""Every encoding a frame may have, by name."""

ENCODING_OF_CODE: Mapping[int, Encoding] = {e.code: e for e in ENCODINGS.values()}
"""The same by their number on the store."""

ENCODING_CHOICES: tuple[str, ...] = tuple(name for name in ENCODINGS if name != "fp64")
"""What a user may ask for. fp64 is no choice: it is how float64 tables are kept under fp32."""

BITS_CHOICES: Mapping[int, str] = {2: "q2", 3: "q3", 4: "q4", 8: "q8", 16: "bf16", 32: "fp32"}
"""Bits of a stored weight, the other way to choose, and the encoding that is meant."""

DEFAULT_ENCODING = "q8"


def encoding_named(name: str) -> Encoding:
    """The `Encoding` of that name; raises `UnknownName`."""
    encoding = ENCODINGS.get(name)
    if encoding is None:
        raise UnknownName(f"unknown encoding {name!r}", remedy=f"one of {', '.join(ENCODINGS)}")
    return encoding


def bits_of(name: str) -> int | None:
    """Bits of a weight under the encoding of that name; None for a name of another version's."""
    encoding = ENCODINGS.get(name)
    return None if encoding is None else encoding.bits


# Encodings of optimizer state

StateEncoding = Literal["fp32", "bf16"]
STATE_ENCODINGS: tuple[StateEncoding, ...] = get_args(StateEncoding)
"""fp32 keeps all state as it is; bf16 narrows point-wise float32 fields, never row-wise ones."""
DEFAULT_STATE_ENCODING: StateEncoding = "fp32"


def stored_state_dtype(state_encoding: str, *, pointwise: bool, dtype: str) -> str:
    """The dtype a field of optimizer state is stored in; raises `UnknownName`."""
    if state_encoding not in STATE_ENCODINGS:
        raise UnknownName(
            f"unknown state encoding {state_encoding!r}", remedy=f"one of {', '.join(STATE_ENCODINGS)}"
        )
    return "bfloat16" if state_encoding == "bf16" and pointwise and dtype == "float32" else dtype


# Differentials: which rows a save holds (`write.differential` is what they mean)

Differential = Literal["full", "one-shot", "consecutive", "intermittent"]
DIFFERENTIALS: tuple[Differential, ...] = get_args(Differential)
DEFAULT_DIFFERENTIAL: Differential = "intermittent"
COVERS_NEWEST: frozenset[str] = frozenset(("consecutive", "full"))
"""Under these the next delta, if any, covers the newest checkpoint."""


def differential_named(name: str) -> Differential:
    """The differential of that name; raises `UnknownName`."""
    for differential in DIFFERENTIALS:
        if differential == name:
            return differential
    raise UnknownName(f"unknown differential policy {name!r}", remedy=f"one of {', '.join(DIFFERENTIALS)}")


# Rules by which bits are chosen

BITS_RULES = ("budget", "check-n-run")
NO_BITS_RULE = "fixed"
BITS_GOALS = ("", *BITS_RULES, NO_BITS_RULE)
"""Nothing and fixed: bits are not chosen. In a directive, nothing keeps what the pod was started with."""


CHOICES: Mapping[str, tuple[str, ...]] = {
    "bits_goal": BITS_GOALS,
    "encoding": ENCODING_CHOICES,
    "state_encoding": STATE_ENCODINGS,
    "differential": DIFFERENTIALS,
}
"""Setting -> the words it takes."""

# Versions of the protocols


class ProtocolVersions(NamedTuple):
    """The versions that this side of a protocol speaks, both ends inclusive."""

    least: int
    most: int

    def common(self, least: int, most: int) -> int | None:
        """The newest version that a peer of versions `least` to `most` speaks too; None: there is none."""
        newest = min(self.most, most)
        return newest if newest >= max(self.least, least) else None


TRAINER_PROTOCOL = ProtocolVersions(1, 1)
"""Between trainer and sidecar."""
FLEET_PROTOCOL = ProtocolVersions(1, 1)
"""Between sidecar and controller."""


ONE_RUN, RUN_PER_POD = "one", "per-pod"
"""What a workload's pods train: ranks of one run, or each numbered pod a run of its own."""


# Names in a commit's metadata that are ours

PLS_KEY = "deltashard/pls"
"""The run's portion of lost samples; there once a recovery was partial."""
RECOVERIES_KEY = "deltashard/partial-recoveries"
"""How many recoveries were."""
INCREMENTS_KEY = "deltashard/increments"
"""Of a delta over a baseline: which one, and the sizes of the increments before it (`write.differential`)."""
ORDERS_KEY = "deltashard/orders"
"""Ids of the saves that were ordered and that it carries out, with spaces between."""
PRECISION_KEY = "deltashard/precision"
"""The coarsest encodings that a row of the checkpoint may be stored with (`write.precision`)."""
INCONSISTENT_KEY = "deltashard/inconsistent"
"""Checkpoints before this one ("seq:4,seq:5") in which rows were found that are not those of their step."""
LINEAGE_KEY = "deltashard/lineage"
"""Of a run under partial recovery, in every commit."""
