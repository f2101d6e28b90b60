"""What a sidecar's report changes of a run. Pure.

A report that is late or doubled changes nothing; each incident in it is counted once, by its natural key (`ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

from deltashard_proto.cause import Cause

from deltashard_operator.fleet.report import Incident, IncidentKind, PodState, Report, RunReport
from deltashard_operator.run import failure
from deltashard_operator.run.failure import Loss
from deltashard_operator.run.ledger import incident_key
from deltashard_operator.run.watched_run import (
    NO_PART,
    OTHERS_BEAT_S,
    SILENT_BEATS,
    SPEAKER_BEAT_S,
    Heard,
    NewestCheckpoint,
    Notice,
    Run,
    RunPart,
    part_of,
    with_loss,
)

_news = attrgetter("phase", "attempt", "store_ok", "credentials_ok")
"""What a change of a pod's state is."""


def with_report(
    run: Run, report: Report, now_s: float, *, beat_s: float = 0.0
) -> tuple[Run, tuple[Notice, ...]]:
    """The run after a report, and the incidents in it that people should hear of.

    A report that is late (an older one of the same process, or one of an older process) changes nothing. `beat_s`: the
    least between two reports of a sidecar, where there are too many of them.
    """
    uid = report.who.pod_uid
    known = run.heard.get(uid)
    if uid not in run.pods or (known is not None and _is_late(known, report)):
        return run, ()
    part = part_of(run, uid, report.pod.run)
    speaks = _speaks(run, report, part, now_s)
    seen = known.incident if known is not None and known.process == report.process else 0
    run = replace(
        run,
        heard={
            **run.heard,
            uid: Heard(
                process=report.process,
                sequence=report.sequence,
                at_s=now_s,
                beat_s=max(SPEAKER_BEAT_S if speaks else OTHERS_BEAT_S, beat_s),
                pod=report.pod,
                speaks=speaks,
                changed_s=now_s
                if known is None or _news(known.pod) != _news(report.pod)
                else known.changed_s,
                started_at_s=report.who.started_at_s,
                incident=max(seen, *(each.id for each in report.incidents)) if report.incidents else seen,
                name=report.who.pod,
                url=report.who.url,
            ),
        },
        heard_since_s=run.heard_since_s or now_s,
        store=report.who.url or run.store,
    )
    notices: list[Notice] = []
    for each in report.incidents:
        run, found = _with_incident(run, report, each, part, fresh=each.id > seen, now_s=now_s)
        if found is not None:
            notices.append(found)
    if report.pod.run:
        run = _with_part(run, report, part, speaks=speaks, now_s=now_s)
    return run, tuple(notices)


def _is_late(known: Heard, report: Report) -> bool:
    if known.process == report.process:
        return report.sequence <= known.sequence
    return report.who.started_at_s < known.started_at_s


def has_rank_0(pod: PodState) -> bool:
    return any(each.rank == 0 for each in pod.ranks)


def _speaks(run: Run, report: Report, part: str, now_s: float) -> bool:
    """Whether the sidecar that reports is the one to speak for its part of the run."""
    uid = report.who.pod_uid
    if part or not any(each.alive for key, each in run.pods.items() if key != uid):
        return True
    known = run.parts.get(part, NO_PART)
    other = run.heard.get(known.speaker) if known.speaker != uid else None
    if other is not None and (not other.is_fresh(now_s) or run.pods[known.speaker].over):
        other = None
    if has_rank_0(report.pod):
        return other is None or not has_rank_0(other.pod) or other.pod.attempt <= report.pod.attempt
    silent_s = now_s - max(known.spoken_at_s, run.heard_since_s or now_s)
    return other is None and (known.speaker == uid or silent_s > SILENT_BEATS * SPEAKER_BEAT_S)


TOLD: Mapping[IncidentKind, tuple[str, str]] = {
    IncidentKind.SAVE_FAILED: ("SaveFailed", "failing"),
    IncidentKind.FENCED: ("Fenced", "fenced"),
    IncidentKind.TRACKING_FAULT: ("TrackingFault", "tracking"),
    IncidentKind.FELL_BACK: ("FellBack", "fell_back"),
    IncidentKind.CREDENTIALS_MISSING: ("CredentialsMissing", ""),
    IncidentKind.STORE_UNAVAILABLE: ("StoreUnavailable", "failing"),
}
"""Incidents that are told as they are: (reason of the Event, field of the run that has the newest sentence)."""


def _with_incident(
    run: Run, report: Report, said: Incident, part: str, *, fresh: bool, now_s: float
) -> tuple[Run, Notice | None]:
    """The run after an incident, and what people should hear of it; `fresh`: it was not told before."""
    pod, key = report.who.pod, incident_key(report, said, part)
    if said.kind is IncidentKind.TRAINER_LOST:
        return _with_trainer_lost(run, report, said, part, key, now_s), None
    if said.kind is IncidentKind.RESTORED:
        source = f" from the {said.cause}" if said.cause else ""
        lost = f", {said.lost_steps} steps are trained again" if said.lost_steps else ""
        text = f"pod {pod}: restored step {said.step}{source} in {said.seconds:.1f} s{lost}"
        told = Notice(reason="Restored", message=text, warning=False, key=key)
        return _with_restore(run, said, part, key), told
    if said.kind not in TOLD:
        return run, None
    reason, name = TOLD[said.kind]
    text = f"pod {pod}: {said.message}" if said.message else f"pod {pod}"
    if said.count > 1:
        text += f" ({said.count} times)"
    if said.kind is IncidentKind.FENCED and _is_replaced(run, report, said, part):
        name, text = "", f"pod {pod}, which was replaced: {said.message or 'its trainer was ended'}"
    if fresh and name:
        run = replace(run, **{name: text})  # type: ignore[arg-type]
    return run, Notice(reason=reason, message=text, key=key)


def _is_replaced(run: Run, report: Report, said: Incident, part: str) -> bool:
    """Whether a trainer that was fenced had been replaced before, as when its node comes back: that is no trouble."""
    older = report.pod.attempt < run.parts.get(part, NO_PART).attempt
    return said.cause != Cause.TAKEN_OVER and (older or not run.pods[report.who.pod_uid].alive)


def _with_restore(run: Run, said: Incident, part: str, key: str) -> Run:
    ledger = run.ledger
    if ledger.has_restored(part, said.attempt) if said.attempt else ledger.has(key, said.at_s):
        return run
    if not said.attempt:
        ledger = ledger.with_key(key, said.at_s)
    return replace(run, ledger=ledger.with_restored(part, said.attempt, said.lost_steps), fell_back="")


def _with_trainer_lost(run: Run, report: Report, said: Incident, part: str, key: str, now_s: float) -> Run:
    if run.ledger.has(key, said.at_s):
        return run
    who = report.who
    at_s = said.at_s or now_s
    if report.now_s:  # the pod's clock is not ours
        at_s = now_s - max(report.now_s - at_s, 0.0) if said.at_s else now_s
    loss = Loss(
        at_s=min(at_s, now_s),
        cause=failure.LossCause.TRAINER_LOST,
        message=said.message[: failure.MAX_MESSAGE],
        pod=who.pod,
        pod_uid=who.pod_uid,
        node=who.node,
    )
    return with_loss(replace(run, ledger=run.ledger.with_key(key, loss.at_s)), loss, part)


def _with_part(run: Run, report: Report, part: str, *, speaks: bool, now_s: float) -> Run:
    """The run with what a report tells of its part."""
    before = run.parts.get(part, NO_PART)
    after = replace(before, attempt=max(before.attempt, report.pod.attempt))
    if speaks:
        after = replace(after, speaker=report.who.pod_uid, spoken_at_s=now_s)
        if report.run is not None:
            after = _with_state(after, report.run, report.pod.attempt > before.attempt, now_s)
            after = replace(after, kept=() if part else _kept(after, report.run, now_s))
    commit = after.state.newest if after.state is not None else None
    # A trainer of this workload commits again; another workload's commits stand in the same log.
    if after.seq > before.seq and commit is not None and commit.attempt <= after.attempt:
        run = replace(run, fenced="")
    if after.attempt > before.attempt:
        run = replace(run, fenced="", tracking="")
    return replace(run, parts={**run.parts, part: after})


def _with_state(part: RunPart, told: RunReport, anew: bool, now_s: float) -> RunPart:
    """The part after who speaks for it told its state; `anew`: another attempt does.

    The clock that counts is ours: that of a node may be wrong, and would hide that checkpoints are old or raise it for
    nothing. The commit's age is taken only where it was there before anything was known of the part.
    """
    part = replace(part, openings=max(part.openings, told.openings))
    seq = told.newest.seq if told.newest is not None else 0
    # After a rewind the newest commit is an older one: by the word of the attempt that resumed it.
    if part.state is not None and seq < part.seq and not anew:
        return part
    at_s = part.committed_at_s
    if part.state is None and not part.seq:
        at_s = now_s - told.newest_age_s if seq else 0.0
    elif seq > part.seq:
        at_s = now_s
    return replace(part, seq=seq, committed_at_s=at_s, state=replace(told, checkpoints=()))


def _kept(part: RunPart, told: RunReport, now_s: float) -> tuple[NewestCheckpoint, ...]:
    """The newest checkpoints; a time that was told once stays, as ages are told anew with each report."""
    times = {each.seq: each.at_s for each in part.kept} | {part.seq: part.committed_at_s}
    return tuple(
        NewestCheckpoint(
            seq=each.seq,
            step=each.step,
            at_s=times.get(each.seq, now_s - each.age_s),
            bytes=each.bytes,
            pins=each.pins,
        )
        for each in sorted(told.checkpoints, key=lambda each: -each.seq)
    )
