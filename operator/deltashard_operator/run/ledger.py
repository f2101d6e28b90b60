"""Counters of a run that must survive controller restarts, and their encoding in `status.ledger`. Pure.

Each counted fact has a natural key, so a repeated report is not counted twice: restores are keyed by (part of the run,
attempt); facts known only from the API or an incident (end of a pod, container restart, lost trainer) by a hash. Only
the newest keys are kept, and older facts are treated as counted. The number of failures is the number of times the log
records that training was reopened, independent of the cause, the number of lost pods and the controller's availability.

`status.ledger` is base64 of deflated JSON of at most `MAX_BYTES`. The oldest entries are dropped if it does not fit.
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
"""Maximum number of restored attempts per part whose keys are kept."""
MAX_KEYS = 256
MAX_PARTS = 256
VERSION = 2
_MAX_JSON = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Counters of a run. Mappings are never changed in place."""

    restores: int = 0
    lost_steps: int = 0
    restored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Newest attempts that are counted as restored, ascending, by part of the run."""
    failures: int = 0
    attempts_opened: Mapping[str, int] = field(default_factory=dict)
    """Counted attempts_opened of training by part. The last changed part is last."""
    crashes: Mapping[str, Crash] = field(default_factory=dict)
    """Crash state by part, for parts whose newest loss was a crash."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """Newest keys of counted facts with their times, oldest first."""
    counted_until_s: float = 0.0
    """Facts up to this time that have no key are treated as counted."""
    clipped: bool = False
    """Parts were dropped, so the first report of an unknown part sets its attempts_opened instead of counting them."""

    @cached_property
    def text(self) -> str:
        """Encoded form for the status, cached because encoding dominates the cost of writing a status."""
        return encoded(self)

    def has_restored(self, part: str, attempt: int) -> bool:
        """Return whether the restore by this attempt is counted. Attempt 0 (unknown) is treated as counted."""
        known = self.restored.get(part, ())
        return not attempt or attempt in known or (len(known) >= MAX_ATTEMPTS and attempt < known[0])

    def has(self, key: str, at_s: float) -> bool:
        """Return whether the fact with this key and time is counted."""
        return key in self.counted or 0.0 < at_s <= self.counted_until_s

    def with_restored(self, part: str, attempt: int, lost_steps: int) -> Ledger:
        known = tuple(sorted({*self.restored.get(part, ()), attempt}))[-MAX_ATTEMPTS:]
        others = {key: each for key, each in self.restored.items() if key != part}
        restores, steps = self.restores + 1, self.lost_steps + lost_steps
        return replace(self, restores=restores, lost_steps=steps, restored={**others, part: known})

    def with_attempts_opened(self, part: str, attempts_opened: int) -> Ledger:
        """Return the ledger after a report that this part of the run was opened `attempts_opened` times."""
        if attempts_opened <= self.attempts_opened.get(part, 0):
            return self
        known = self.attempts_opened.get(part, attempts_opened if self.clipped else 1)
        others = {key: each for key, each in self.attempts_opened.items() if key != part}
        failures = self.failures + attempts_opened - known
        return replace(self, failures=failures, attempts_opened={**others, part: attempts_opened})

    def with_loss(self, part: str, loss: Loss, key: str, seq: int) -> Ledger:
        """Return the ledger after the loss with this key. `seq` is the newest commit of the part."""
        counted, until_s = {**self.counted, key: loss.at_s}, self.counted_until_s
        if len(counted) > MAX_KEYS:
            until_s = max(until_s, counted.pop(next(iter(counted))))
        crashes = {each: crash for each, crash in self.crashes.items() if each != part}
        if (crash := crash_after(self.crashes.get(part), loss, seq)) is not None:
            crashes[part] = crash
        return replace(self, counted=counted, counted_until_s=until_s, crashes=crashes)


def hashed(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def incident_key(report: Report, incident: Incident, part: str) -> str:
    """Return the natural key of an incident. A restore is keyed by its attempt, whichever pod reports it."""
    identity = report.identity
    if incident.kind is IncidentKind.RESTORED and incident.attempt:
        return hashed(identity.workload_uid, "restored", part, incident.attempt)
    return hashed(identity.workload_uid, identity.pod_uid, report.process, incident.id)


def acknowledged_id(durable: Ledger, recorded: Container[str], report: Report, part: str) -> int:
    """Return the id of the newest incident in the report that the sidecar need not repeat, or 0.

    `durable` is the ledger in the written status; `recorded` the keys of incidents whose events are written
    (`RunEvent.key`).
    """
    newest = 0
    for each in report.incidents:
        key, kind = incident_key(report, each, part), each.kind
        if kind is IncidentKind.TRAINER_LOST:
            done = durable.has(key, each.at_s)
        else:  # an incident kind of a newer sidecar cannot be processed here
            done = kind is IncidentKind.UNKNOWN or key in recorded
        if not done or (kind is IncidentKind.RESTORED and not durable.has_restored(part, each.attempt)):
            break
        newest = each.id
    return newest


def encoded(ledger: Ledger) -> str:
    """Encode a ledger as text. An empty ledger gives an empty text."""
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
    """Decode a ledger. Raises `ValueError` if the text is invalid or written by a newer controller."""
    if not text:
        return Ledger()
    deflated = zlib.decompressobj()
    try:
        found = json.loads(deflated.decompress(base64.b64decode(text, validate=True), _MAX_JSON))
        if not deflated.eof or found["version"] != VERSION:
            raise ValueError("status.ledger is truncated, or written by a newer controller")
        found["restored"] = {part: tuple(each) for part, each in found["restored"].items()}
        found["crashes"] = {part: _value(Crash, each) for part, each in found.get("crashes", {}).items()}
        return _value(Ledger, found)
    except (zlib.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError("status.ledger is not a valid ledger") from error


def _clipped(ledger: Ledger, parts: int) -> Ledger:
    # A part with one opening needs no entry: an unknown part starts at one.
    again = {part: n for part, n in ledger.attempts_opened.items() if n > 1}
    return replace(
        ledger,
        restored=_newest(ledger.restored, parts),
        attempts_opened=_newest(again, parts),
        crashes=_newest(ledger.crashes, parts),
        clipped=ledger.clipped or len(again) > parts,
    )


def _newest(mapping: Mapping[str, T], n: int) -> dict[str, T]:
    return dict(list(mapping.items())[max(len(mapping) - n, 0) :])


def _plain(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, by name."""
    return {
        each.name: found for each in fields(value) if (found := getattr(value, each.name)) != each.default
    }


def _value(kind: type[T], found: Mapping[str, Any]) -> T:
    """Build a dataclass from these fields. Fields added by a newer controller are ignored."""
    return kind(**{each.name: found[each.name] for each in fields(kind) if each.name in found})  # type: ignore[arg-type]
