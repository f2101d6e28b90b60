"""Choice of the bits per stored weight, from the error that restores add and their expected number. Pure.

A quantization error enters training only at a restore. Its harm is proportional to the *relative squared error* of a
table's rows (measured harm at 2 : 3 : 4 bit is 14 : 3.5 : 1, squared errors are 15.7 : 4.2 : 1). So a table takes the
fewest bits b with

    sum over past restores of e^2  +  N95 e_b^2  <=  BUDGET

where e_b is the relative L2 error of a sample of its rows at b bits, and N95 the 95 % quantile of future restores, at
least one.
Small hot tables are harmed most and save nothing, so only the tables of the largest 90 % of bytes go below 8 bit.
`BUDGET` keeps the harm to training below the .01 % that Check-N-Run promises, as far as `make papers` measures it.
Within it, Gaussian rows of 64 columns allow no restore at 2 bit, and 1, 4 and 1,076 at 3, 4 and 8 bit. (0.11 would give
the paper's own 1, 3, 16 and 3,900, but then 20 restores harmed training by .055 %.)

**check-n-run** is the paper's rule (NSDI'22): 2 bit for at most 1 expected restore, 3 for 3, 4 for 20, else 8; and 8
for the rest of the run once more restores happened than expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import BITS_CHOICES, ENCODING_CHOICES

BUDGET = 0.03
BITS = (2, 3, 4, 8)
SAFE_BITS = 8
LARGE_SHARE = 0.9
"""Share of all table bytes, of the largest tables, that may go below 8 bit."""
LAST_SHARE = 0.1
"""Final share of the planned steps in which all tables stay at 8 bit."""
GAUSSIAN_ERRORS: Mapping[int, float] = {2: 0.322, 3: 0.166, 4: 0.0814, 8: 0.00528}
"""Bits -> relative L2 error of Gaussian rows of 64 columns under these codecs, for tables without a sample yet."""
MAX_TABLES = 3072
"""Maximum length of the per-table encodings; more does not fit into a commit's metadata."""
CHECK_N_RUN_LEVELS = ((1.0, 2), (3.0, 3), (20.0, 4))


class BadTables(UserError):
    """A user's per-table encodings cannot be parsed."""


def parse_encodings(text: str, *, where: str) -> Mapping[str, str]:
    """Parse encodings by table, such as `emb.user=q8,emb.item=q4`; raises `BadTables`."""
    found: dict[str, str] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        table, _, encoding = each.rpartition("=")
        if not table or encoding not in ENCODING_CHOICES or table in found:
            raise BadTables(
                f"{each[:80]!r} is not an encoding of a table"
                if table not in found
                else f"{table[:80]!r} occurs twice",
                where=where,
                remedy=f"such as emb.user=q8,emb.item=q4, with one of {', '.join(ENCODING_CHOICES)}",
            )
        found[table] = encoding
    return found


def match_tables(given: Mapping[str, str], tables: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return (encodings by full table name, unmatched names); `given` has names with or without `.weight`."""
    found, used = {}, set()
    for table in tables:
        for name in (table, table.removesuffix(".weight")):
            if name in given:
                found[table] = given[name]
                used.add(name)
                break
    return found, tuple(sorted(given.keys() - used))


def format_encodings(encodings: Mapping[str, str]) -> str:
    return ",".join(f"{table}={encoding}" for table, encoding in sorted(encodings.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """Statistics of one table."""

    raw_bytes: int
    """Bytes of its weights."""
    errors: Mapping[int, float] = field(default_factory=dict)
    """Bits -> relative L2 error of a sample of its rows; empty: not sampled yet."""
    spent: float = 0.0
    """Sum of e^2 over its past restores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreForecast:
    """Expected restores of a run."""

    restores: int
    """N95: upper bound of future restores at 95 % probability."""
    expected: float
    """Expected number of restores of the whole run (check-n-run)."""
    restores_so_far: int = 0
    """Restores so far."""
    near_end: bool = False
    """Whether the run is in the last tenth of its planned steps, or saves its last checkpoint."""
    min_bits: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBits:
    """Chosen encodings and the reason."""

    encodings: Mapping[str, str]
    """By table."""
    why: str


def choose_bits(
    goal: str, tables: Mapping[str, TableStats], forecast: RestoreForecast, fixed: Mapping[str, str]
) -> ChosenBits:
    """Choose encodings by table for a goal, `budget` or `check-n-run`; `fixed`: the user's per-table encodings."""
    bits = dict.fromkeys(tables, SAFE_BITS)
    if forecast.near_end:
        why = "the run is near its end: its final checkpoints are stored with 8 bit"
    elif goal == "check-n-run":
        least = max(check_n_run_bits(forecast.expected, forecast.restores_so_far), forecast.min_bits)
        bits = dict.fromkeys(tables, next((b for b in BITS if b >= least), SAFE_BITS))
        why = f"Check-N-Run: {forecast.expected:.2g} restores are expected"
        if forecast.restores_so_far > forecast.expected:
            why = f"Check-N-Run: {forecast.restores_so_far} restores happened, {forecast.expected:.2g} were expected"
    else:
        # A checkpoint is useful only if it can be restored at least once.
        count = max(forecast.restores, 1)
        for name in large_tables(tables):
            cheap = (b for b in BITS if b >= forecast.min_bits and _affordable(tables[name], b, count))
            bits[name] = next(cheap, SAFE_BITS)
        why = (
            f"at most {count} restore{'s' * (count != 1)} to come (95 %), each adding its squared error to a budget of "
            f"{BUDGET:g}; tables of the smallest {100 * (1 - LARGE_SHARE):.0f} % of bytes keep 8 bit"
        )
    return ChosenBits(
        encodings={name: fixed.get(name, BITS_CHOICES[width]) for name, width in bits.items()}, why=why
    )


def _affordable(facts: TableStats, bits: int, restores: int) -> bool:
    error = facts.errors.get(bits)
    return error is not None and facts.spent + restores * error**2 <= BUDGET


def large_tables(tables: Mapping[str, TableStats]) -> frozenset[str]:
    """Return the largest tables up to and including the one that brings their share of all bytes to 90 %."""
    total = sum(each.raw_bytes for each in tables.values())
    held, found = 0, set()
    for name, facts in sorted(tables.items(), key=lambda each: (-each[1].raw_bytes, each[0])):
        if held >= LARGE_SHARE * total:
            break
        held += facts.raw_bytes
        found.add(name)
    return frozenset(found)


def check_n_run_bits(expected: float, restores_so_far: int) -> int:
    """Return the paper's bits for the expected restores of the whole run and the number so far."""
    if restores_so_far > expected:
        return SAFE_BITS
    return next((bits for most, bits in CHECK_N_RUN_LEVELS if expected <= most), SAFE_BITS)
