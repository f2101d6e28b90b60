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
from dataclasses import dataclass, field, replace
from typing import Any

from deltashard_operator.fleet.report import Incident, IncidentKind, Report
from deltashard_operator.run.failure import MAX_LOSSES, Crash, Loss, LossCause, Point, Tally
from deltashard_operator.run.incident import Incidents, Pending, Times

MAX_BYTES = 16384
MAX_ATTEMPTS = 32
"""Restored attempts of a part whose keys are kept."""
MAX_KEYS = 256
MAX_PARTS = 256
VERSION = 1
_MAX_JSON = 1 << 20
_NO_TALLY = Tally()


@dataclass(frozen=True, slots=True, kw_only=True)
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
    incidents: Incidents = field(default_factory=Incidents)
    counted: Mapping[str, float] = field(default_factory=dict)
    """Newest keys of what is counted once, and when it happened, oldest first."""
    counted_until_s: float = 0.0
    """What is not newer than this and has no key counts as counted."""
    clipped: bool = False
    """Parts were left out: one that is not known begins with the openings that it tells."""

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
            restored={**_without(self.restored, part), part: known},
        )

    def with_key(self, key: str, at_s: float) -> Ledger:
        counted, until_s = {**self.counted, key: at_s}, self.counted_until_s
        if len(counted) > MAX_KEYS:
            until_s = max(until_s, counted.pop(next(iter(counted))))
        return replace(self, counted=counted, counted_until_s=until_s)

    def with_tally(self, part: str, tally: Tally) -> Ledger:
        return replace(self, tallies={**_without(self.tallies, part), part: tally})


def _without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


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
    if ledger == Ledger():
        return ""
    parts = MAX_PARTS
    while True:
        text = json.dumps(_document(ledger, parts), separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        found = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        if len(found) <= MAX_BYTES or not parts:
            return found
        parts //= 2


def _document(ledger: Ledger, parts: int) -> dict[str, Any]:
    """The newest of it: of so many parts, and of losses in proportion."""
    told = {part: each for part, each in ledger.tallies.items() if not (part and _begins(each))}
    kept = dict(list(told.items())[len(told) - min(parts, len(told)) :])
    attempts = list(ledger.restored.items())
    share = parts / MAX_PARTS
    losses = sorted((loss for each in kept.values() for loss in each.losses), key=lambda each: each.at_s)
    others = ledger.others + sum(each.failures for part, each in told.items() if part not in kept)
    found = {
        "v": VERSION,
        "restores": ledger.restores,
        "lost": ledger.lost_steps,
        "restored": dict(attempts[max(len(attempts) - parts, 0) :]),
        "others": others,
        "clipped": ledger.clipped or len(kept) < len(told),
        "tallies": {part: _tally(each) for part, each in kept.items()},
        "order": list(kept),
        "losses": [_loss(each) for each in losses[max(len(losses) - int(MAX_LOSSES * share), 0) :]],
        "causes": {cause: [each.restores, each.lossy] for cause, each in ledger.incidents.causes.items()},
        "pending": {
            part: [each.reached, each.replayed, each.doubted]
            for part, each in list(ledger.incidents.pending.items())[-parts:][:parts]
        },
        "keys": list(ledger.counted.items()),
        "until": ledger.counted_until_s,
    }
    return {key: value for key, value in found.items() if value}


def _begins(tally: Tally) -> bool:
    """Whether a controller that knows nothing of a part comes to the same, or nearly."""
    return replace(tally, openings=0, rose_at_s=0.0) == _NO_TALLY and tally.openings <= 1


def _tally(tally: Tally) -> list[Any]:
    crash = tally.crash
    told = [list(crash.endings), *_point(crash.at), crash.times] if crash is not None else None
    return [tally.settled, tally.openings, tally.bursts, told]


def _point(at: Point) -> list[int]:
    return [at.seq, int(at.trained_s)]


def _loss(loss: Loss) -> list[Any]:
    return [
        int(loss.at_s),
        loss.cause.value,
        loss.message,
        loss.pod,
        loss.pod_uid,
        loss.node,
        loss.run,
        loss.opening,
        loss.interruptions,
        loss.ending,
        *_point(loss.at),
    ]


def decoded(text: str) -> Ledger:
    """The ledger of a text; raises `ValueError`: it is none, or of a newer controller."""
    if not text:
        return Ledger()
    deflated = zlib.decompressobj()
    found = json.loads(deflated.decompress(base64.b64decode(text, validate=True), _MAX_JSON))
    if not deflated.eof:
        raise ValueError("ledger is cut short")
    if found["v"] != VERSION:
        raise ValueError(f"ledger of version {found['v']}")
    losses = tuple(map(_loss_of, found.get("losses", ())))
    told = found.get("tallies", {})
    return Ledger(
        restores=found.get("restores", 0),
        lost_steps=found.get("lost", 0),
        restored={part: tuple(attempts) for part, attempts in found.get("restored", {}).items()},
        tallies={
            part: _tally_of(told[part], tuple(each for each in losses if each.run == part))
            for part in found.get("order", ())
        },
        others=found.get("others", 0),
        incidents=Incidents(
            causes={
                cause: Times(restores=restores, lossy=lossy)
                for cause, (restores, lossy) in found.get("causes", {}).items()
            },
            pending={
                part: Pending(reached=reached, replayed=replayed, doubted=doubted)
                for part, (reached, replayed, doubted) in found.get("pending", {}).items()
            },
        ),
        counted=dict(found.get("keys", ())),
        counted_until_s=found.get("until", 0.0),
        clipped=found.get("clipped", False),
    )


def _tally_of(found: list[Any], losses: tuple[Loss, ...]) -> Tally:
    settled, openings, bursts, told = found
    crash = None
    if told is not None:
        endings, seq, trained_s, times = told
        crash = Crash(endings=tuple(endings), at=Point(seq=seq, trained_s=float(trained_s)), times=times)
    return Tally(settled=settled, openings=openings, bursts=bursts, crash=crash, losses=losses)


def _loss_of(found: list[Any]) -> Loss:
    at_s, cause, message, pod, pod_uid, node, run, opening, interruptions, ending, seq, trained_s = found
    return Loss(
        at_s=float(at_s),
        cause=LossCause(cause) if cause in set(LossCause) else LossCause.FAILED,
        message=message,
        pod=pod,
        pod_uid=pod_uid,
        node=node,
        run=run,
        opening=opening,
        interruptions=interruptions,
        ending=ending,
        at=Point(seq=seq, trained_s=float(trained_s)),
    )
