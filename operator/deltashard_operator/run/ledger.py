"""What is counted of a run and must survive the controller, and its form in `status.ledger`. Pure.

Each counted fact has a natural key, so that what is told again is not counted again: a restore is known by (part of the
run, attempt), failures by how often the log says that training was opened, and what only the API or an incident tells
(the end of a pod, a container's restart, a trainer that went) by a hash. Of the keys the newest are kept; what is older
than all of them counts as counted.

`status.ledger` is base64 of deflated canonical JSON, `MAX_BYTES` at most: of what does not fit the newest stays. The
failures of a part that is not kept stay in the sum.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Container, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from deltashard_operator.fleet.report import Incident, IncidentKind, Report
from deltashard_operator.run.failure import MAX_LOSSES, LossCause, Tally

V = TypeVar("V")
MAX_BYTES = 16384
MAX_ATTEMPTS = 32
"""Restored attempts of a part whose keys are kept."""
MAX_KEYS = 256
MAX_PARTS = 256
VERSION = 1
_MAX_JSON = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What is counted of a run. Mappings are never changed in place."""

    restores: int = 0
    lost_steps: int = 0
    restored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Newest attempts that are counted as restored, rising, by part of the run (see `Loss.run`)."""
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    """Failures, by part; the one that changed last is last."""
    others: int = 0
    """Failures of parts that are not in `tallies` any more."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Interruptions that are over, by `LossCause`; a crash loop is one."""
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

    @property
    def failures(self) -> int:
        return self.others + sum(each.failures for each in self.tallies.values())

    def has_restored(self, part: str, attempt: int) -> bool:
        known = self.restored.get(part, ())
        return attempt in known or (len(known) >= MAX_ATTEMPTS and attempt < known[0])

    def has(self, key: str, at_s: float) -> bool:
        """Whether what has this key and happened then is counted."""
        return key in self.counted or 0.0 < at_s <= self.counted_until_s

    def with_restored(self, part: str, attempt: int, lost_steps: int) -> Ledger:
        """With a restore, be it by an attempt (not 0) whose key is kept."""
        known = tuple(sorted({*self.restored.get(part, ()), attempt} - {0}))[-MAX_ATTEMPTS:]
        return replace(
            self,
            restores=self.restores + 1,
            lost_steps=self.lost_steps + lost_steps,
            restored={**{key: each for key, each in self.restored.items() if key != part}, part: known},
        )

    def with_key(self, key: str, at_s: float) -> Ledger:
        counted, until_s = {**self.counted, key: at_s}, self.counted_until_s
        if len(counted) > MAX_KEYS:
            until_s = max(until_s, counted.pop(next(iter(counted))))
        return replace(self, counted=counted, counted_until_s=until_s)

    def with_tallies(self, changed: Mapping[str, Tally]) -> Ledger:
        kept = {part: each for part, each in self.tallies.items() if part not in changed}
        return replace(self, tallies={**kept, **changed})


def hashed(*parts: object) -> str:
    """A short key of these."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def incident_key(report: Report, said: Incident, part: str) -> str:
    """Natural key of an incident: of a restore its attempt, whoever tells it."""
    who = report.who
    if said.kind is IncidentKind.RESTORED and said.attempt:
        return hashed(who.workload_uid, "restored", part, said.attempt)
    return hashed(who.workload_uid, who.pod_uid, report.process, said.id)


def told(durable: Ledger, recorded: Container[str], report: Report, part: str) -> int:
    """Up to which of the report's incidents the sidecar need tell none again; 0: none.

    Args:
        durable: as it is in the written status.
        recorded: keys of incidents whose Events are recorded (see `Notice.key`).
        report: that has them.
        part: of the run, that the pod is of.
    """
    newest = 0
    for each in report.incidents:
        if not _is_kept(durable, recorded, each, incident_key(report, each, part), part):
            break
        newest = each.id
    return newest


def _is_kept(durable: Ledger, recorded: Container[str], said: Incident, key: str, part: str) -> bool:
    match said.kind:
        case IncidentKind.UNKNOWN:
            return True  # a newer sidecar's, that nobody can tell
        case IncidentKind.TRAINER_LOST:
            return durable.has(key, said.at_s)
        case IncidentKind.RESTORED:
            counted = (
                durable.has_restored(part, said.attempt) if said.attempt else durable.has(key, said.at_s)
            )
            return counted and key in recorded
        case _:
            return key in recorded


def encoded(ledger: Ledger) -> str:
    """Its text, empty for one that counts nothing."""
    if ledger == _NOTHING:
        return ""
    parts = MAX_PARTS
    while True:
        kept = {"version": VERSION, **_plain(_clipped(ledger, parts))}
        text = json.dumps(kept, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        found = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        if len(found) <= MAX_BYTES or not parts:
            return found
        parts //= 2


def decoded(text: str) -> Ledger:
    """The ledger of a text; raises `ValueError`: it is none, or of a newer controller."""
    if not text:
        return _NOTHING
    deflated = zlib.decompressobj()
    try:
        found = json.loads(deflated.decompress(base64.b64decode(text, validate=True), _MAX_JSON))
        if deflated.eof and found["version"] == VERSION:
            value = _value(Ledger, found)
            assert isinstance(value, Ledger)
            return value
    except (zlib.error, KeyError, TypeError) as error:
        raise ValueError("this is no ledger") from error
    raise ValueError("ledger is cut short, or of a newer controller")


def _clipped(ledger: Ledger, parts: int) -> Ledger:
    """The newest of it: of so many parts, and of losses in proportion. What only this controller knows is left out."""
    told = {part: each for part, each in ledger.tallies.items() if not (part and _begins(each))}
    kept = _newest(told, parts)
    losses = sorted(loss.at_s for each in kept.values() for loss in each.losses)
    since_s = next(iter(losses[-max(MAX_LOSSES * parts // MAX_PARTS, 1) :]), 0.0)
    return replace(
        ledger,
        restored=_newest(ledger.restored, parts),
        tallies={
            part: replace(
                each, rose_at_s=0.0, losses=tuple(loss for loss in each.losses if loss.at_s >= since_s)
            )
            for part, each in kept.items()
        },
        others=ledger.others + sum(each.failures for part, each in told.items() if part not in kept),
        clipped=ledger.clipped or len(kept) < len(told),
    )


def _newest(mapping: Mapping[str, V], n: int) -> dict[str, V]:
    return dict(list(mapping.items())[max(len(mapping) - n, 0) :])


def _begins(tally: Tally) -> bool:
    """Whether a controller that knows nothing of a part comes to the same."""
    return tally.openings <= 1 and replace(tally, openings=0, opened_at_s=0.0, rose_at_s=0.0) == Tally()


def _plain(value: Any) -> Any:
    """JSON of a value: of a dataclass the fields that are not at their defaults, by name."""
    if is_dataclass(value):
        return {
            each.name: _plain(found)
            for each in fields(value)
            if (found := getattr(value, each.name)) != each.default
            and (each.default_factory is MISSING or found != each.default_factory())
        }
    if isinstance(value, Mapping):
        return [[key, _plain(each)] for key, each in value.items()]  # in order: the newest is last
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _value(kind: Any, found: Any) -> Any:
    """The value of this type that `_plain` made JSON of; what a newer controller added is left out."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        named = {each.name: hints[each.name] for each in fields(kind) if each.name in found}
        return kind(**{name: _value(hint, found[name]) for name, hint in named.items()})  # type: ignore[operator]
    arguments = get_args(kind)
    if get_origin(kind) is Mapping:
        return {key: _value(arguments[1], each) for key, each in found}
    if get_origin(kind) is tuple:
        return tuple(_value(arguments[0], each) for each in found)
    if arguments:  # or None
        return None if found is None else _value(arguments[0], found)
    if kind is LossCause:
        return LossCause(found) if found in set(LossCause) else LossCause.FAILED
    return kind(found)


_NOTHING = Ledger()
