"""What is counted of a run and must survive the controller, and its form in `status.ledger`. Pure.

Each counted fact has a natural key, so that what is told again is not counted again: a restore is known by (part of the
run, attempt), and what only the API or an incident tells (the end of a pod, a container's restart, a trainer that went)
by a hash. Of the keys the newest are kept; what is older than all of them counts as counted. Failures are how often the
log says that training was opened again, whyever it stopped: however many pods went, and whether a controller looked.

`status.ledger` is base64 of deflated JSON, `MAX_BYTES` at most: of what does not fit the newest stays.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from deltashard_operator.fleet.report import Incident, IncidentKind, Report
from deltashard_operator.run.failure import Crash, Loss, crash_after

T = TypeVar("T")
MAX_BYTES = 16384
MAX_ATTEMPTS = 32
"""Restored attempts of a part whose keys are kept."""
MAX_KEYS = 256
MAX_PARTS = 256
VERSION = 2
_MAX_JSON = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What is counted of a run. Mappings are never changed in place."""

    restores: int = 0
    lost_steps: int = 0
    restored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Newest attempts that are counted as restored, rising, by part of the run."""
    failures: int = 0
    openings: Mapping[str, int] = field(default_factory=dict)
    """How often training was opened as far as it is counted, by part; the one that changed last is last."""
    crashes: Mapping[str, Crash] = field(default_factory=dict)
    """The newest loss by part, where it was a crash."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """Newest keys of what is counted once, and when it happened, oldest first."""
    counted_until_s: float = 0.0
    """What is not newer than this and has no key counts as counted."""
    clipped: bool = False
    """Parts were left out: one that is not known begins with the openings that it tells."""

    @cached_property
    def text(self) -> str:
        """Its form in a status. It is made once: it costs as much as all the rest of a status."""
        return encoded(self)

    def has_restored(self, part: str, attempt: int) -> bool:
        """Whether the restore by this attempt is counted; one without an attempt (0) never needs to be."""
        known = self.restored.get(part, ())
        return not attempt or attempt in known or (len(known) >= MAX_ATTEMPTS and attempt < known[0])

    def has(self, key: str, at_s: float) -> bool:
        """Whether what has this key and happened then is counted."""
        return key in self.counted or 0.0 < at_s <= self.counted_until_s

    def with_restored(self, part: str, attempt: int, lost_steps: int) -> Ledger:
        known = tuple(sorted({*self.restored.get(part, ()), attempt}))[-MAX_ATTEMPTS:]
        others = {key: each for key, each in self.restored.items() if key != part}
        restores, steps = self.restores + 1, self.lost_steps + lost_steps
        return replace(self, restores=restores, lost_steps=steps, restored={**others, part: known})

    def with_openings(self, part: str, openings: int) -> Ledger:
        """After it was told how often the workload opened this part of the run."""
        if openings <= self.openings.get(part, 0):
            return self
        known = self.openings.get(part, openings if self.clipped else 1)
        others = {key: each for key, each in self.openings.items() if key != part}
        failures = self.failures + openings - known
        return replace(self, failures=failures, openings={**others, part: openings})

    def with_loss(self, part: str, loss: Loss, key: str, seq: int) -> Ledger:
        """After a loss that has this key; `seq`: the part's newest commit."""
        counted, until_s = {**self.counted, key: loss.at_s}, self.counted_until_s
        if len(counted) > MAX_KEYS:
            until_s = max(until_s, counted.pop(next(iter(counted))))
        crashes = {each: crash for each, crash in self.crashes.items() if each != part}
        if (crash := crash_after(self.crashes.get(part), loss, seq)) is not None:
            crashes[part] = crash
        return replace(self, counted=counted, counted_until_s=until_s, crashes=crashes)


def hashed(*parts: object) -> str:
    """A short key of these."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def incident_key(report: Report, incident: Incident, part: str) -> str:
    """Natural key of an incident: of a restore its attempt, whoever tells it."""
    who = report.who
    if incident.kind is IncidentKind.RESTORED and incident.attempt:
        return hashed(who.workload_uid, "restored", part, incident.attempt)
    return hashed(who.workload_uid, who.pod_uid, report.process, incident.id)


def acknowledged_id(durable: Ledger, recorded: Container[str], report: Report, part: str) -> int:
    """Up to which of the report's incidents the sidecar need tell none again; 0: none.

    `durable`: as it is in the written status; `recorded`: keys of incidents whose Events are (see `RunEvent.key`).
    """
    newest = 0
    for each in report.incidents:
        key, kind = incident_key(report, each, part), each.kind
        if kind is IncidentKind.TRAINER_LOST:
            done = durable.has(key, each.at_s)
        else:  # nobody can tell what a newer sidecar calls UNKNOWN here
            done = kind is IncidentKind.UNKNOWN or key in recorded
        if not done or (kind is IncidentKind.RESTORED and not durable.has_restored(part, each.attempt)):
            break
        newest = each.id
    return newest


def encoded(ledger: Ledger) -> str:
    """Its text, empty for one of which nothing has to be kept."""
    parts = MAX_PARTS
    if _clipped(ledger, parts) == Ledger():
        return ""
    while True:
        kept = {"version": VERSION, **_plain(_clipped(ledger, parts))}
        text = json.dumps(kept, default=_plain, separators=(",", ":"), ensure_ascii=False)
        found = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        if len(found) <= MAX_BYTES or not parts:
            return found
        parts //= 2


def decoded(text: str) -> Ledger:
    """The ledger of a text; raises `ValueError`: it is none, or of a newer controller."""
    if not text:
        return Ledger()
    deflated = zlib.decompressobj()
    try:
        found = json.loads(deflated.decompress(base64.b64decode(text, validate=True), _MAX_JSON))
        if not deflated.eof or found["version"] != VERSION:
            raise ValueError("ledger is cut short, or of a newer controller")
        found["restored"] = {part: tuple(each) for part, each in found["restored"].items()}
        found["crashes"] = {part: _value(Crash, each) for part, each in found.get("crashes", {}).items()}
        return _value(Ledger, found)
    except (zlib.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError("this is no ledger") from error


def _clipped(ledger: Ledger, parts: int) -> Ledger:
    """The newest of it, of so many parts."""
    # A part that is not known and was opened once comes to the same.
    again = {part: n for part, n in ledger.openings.items() if n > 1}
    return replace(
        ledger,
        restored=_newest(ledger.restored, parts),
        openings=_newest(again, parts),
        crashes=_newest(ledger.crashes, parts),
        clipped=ledger.clipped or len(again) > parts,
    )


def _newest(mapping: Mapping[str, T], n: int) -> dict[str, T]:
    return dict(list(mapping.items())[max(len(mapping) - n, 0) :])


def _plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults, by name."""
    return {
        each.name: found for each in fields(value) if (found := getattr(value, each.name)) != each.default
    }


def _value(kind: type[T], found: Mapping[str, Any]) -> T:
    """The dataclass whose fields these are; what a newer controller added is left out."""
    return kind(**{each.name: found[each.name] for each in fields(kind) if each.name in found})  # type: ignore[arg-type]
