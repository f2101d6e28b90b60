"""Changes of a run by a sidecar's report. Pure.

A late or duplicate report changes nothing. Each incident is counted once, by its natural key (`ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from deltashard_proto.cause import Cause

from deltashard_operator.fleet.report import Incident, IncidentKind, PodState, Report, RunReport
from deltashard_operator.run import failure, watched_run
from deltashard_operator.run.failure import Loss
from deltashard_operator.run.ledger import incident_key
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.watched_run import NO_PART, LastReport, RunEvent, RunPart, WatchedRun, without

_state_key = attrgetter("phase", "attempt", "store_ok", "credentials_ok")
"""Fields whose change counts as a change of the pod's state."""


def with_report(
    run: WatchedRun, report: Report, now_s: float, *, report_interval_s: float = 0.0
) -> tuple[WatchedRun, tuple[RunEvent, ...]]:
    """Return the run after a report, and the events of its incidents.

    A late report (older sequence of the same process, or from an older process) changes nothing. `report_interval_s` is
    the minimum time between two reports of a sidecar under load.
    """
    uid = report.identity.pod_uid
    known = run.last_reports.get(uid)
    if uid not in run.pods or (known is not None and _is_late(known, report)):
        return run, ()
    part = watched_run.part_of(run, uid, report.pod.run)
    is_reporter = _should_report_run(run, report, part, now_s)
    seen = known.incident if known is not None and known.report.process == report.process else 0
    latest = LastReport(
        report=replace(report, run=None, incidents=(), save_results=()),
        at_s=now_s,
        report_interval_s=max(
            watched_run.REPORTER_INTERVAL_S if is_reporter else watched_run.PEER_INTERVAL_S, report_interval_s
        ),
        is_reporter=is_reporter,
        changed_s=_changed_s(known, report, now_s),
        incident=max(seen, *(each.id for each in report.incidents), 0),
    )
    run = replace(
        run,
        last_reports={**run.last_reports, uid: latest},
        first_report_s=run.first_report_s or now_s,
        store=report.identity.url or run.store,
    )
    events: list[RunEvent] = []
    for each in report.incidents:
        run, found = _with_incident(run, report, each, part, is_new=each.id > seen, now_s=now_s)
        events += found
    if report.pod.run:
        run = _with_part(run, report, part, is_reporter=is_reporter, now_s=now_s)
    return run, tuple(events)


def _is_late(known: LastReport, report: Report) -> bool:
    if known.report.process == report.process:
        return report.sequence <= known.report.sequence
    return report.identity.started_at_s < known.report.identity.started_at_s


def _changed_s(known: LastReport | None, report: Report, now_s: float) -> float:
    """Return the time of the sidecar's last state change; for its first report, the start of the process."""
    if known is None:
        return min(report.identity.started_at_s, now_s)
    return known.changed_s if _state_key(known.pod) == _state_key(report.pod) else now_s


def _has_rank_0(pod: PodState) -> bool:
    return any(each.rank == 0 for each in pod.ranks)


def _should_report_run(run: WatchedRun, report: Report, part: str, now_s: float) -> bool:
    """Return whether the reporting sidecar is the reporter of its part of the run."""
    uid = report.identity.pod_uid
    if part or not any(each.alive for key, each in run.pods.items() if key != uid):
        return True
    live = watched_run.live_reports(run, now_s)
    others = [each.pod for key, each in live.items() if each.is_reporter and key != uid]
    if _has_rank_0(report.pod):
        return not any(_has_rank_0(each) and each.attempt > report.pod.attempt for each in others)
    silent_s = now_s - (run.first_report_s or now_s)
    return not others and (
        (uid in live and live[uid].is_reporter) or silent_s > watched_run.REPORTER_TIMEOUT_S
    )


def event_reason(kind: IncidentKind) -> str:
    return kind.value.title().replace("_", "")


def _with_incident(
    run: WatchedRun, report: Report, incident: Incident, part: str, *, is_new: bool, now_s: float
) -> tuple[WatchedRun, tuple[RunEvent, ...]]:
    """Return the run after an incident, and its events. `is_new`: no earlier report contained the incident."""
    key, identity = incident_key(report, incident, part), report.identity
    if incident.kind is IncidentKind.UNKNOWN:
        return run, ()
    if incident.kind is IncidentKind.TRAINER_LOST:
        if not run.ledger.has(key, incident.at_s):
            message = incident.message[: failure.MAX_MESSAGE]
            # The pod's clock is not trusted, and the sidecar reports this incident immediately.
            cause = failure.TRAINER_LOST
            lost = Loss(at_s=now_s, cause=cause, message=message, pod=identity.pod, node=identity.node)
            run = watched_run.with_loss(run, lost, part, key)
        return run, ()
    restored = incident.kind is IncidentKind.RESTORED
    # Fencing a replaced trainer when its node returns is expected and not a problem.
    older = report.pod.attempt < run.parts.get(part, NO_PART).attempt or not run.pods[identity.pod_uid].alive
    replaced = incident.kind is IncidentKind.FENCED and incident.cause != Cause.TAKEN_OVER and older
    pod = f"pod {identity.pod}, which was replaced" if replaced else f"pod {identity.pod}"
    reason, text = event_reason(incident.kind), f"{pod}: {incident.message or 'no details'}"
    if incident.count > 1:
        text += f" ({incident.count} times)"
    if restored and not run.ledger.has_restored(part, incident.attempt):
        ledger = run.ledger.with_restored(part, incident.attempt, incident.lost_steps)
        run = replace(run, ledger=ledger)
        # The restore that fell back itself does not clear FellBack.
        if run.fell_back is None or (run.fell_back[0] == part and run.fell_back[1] < incident.attempt):
            run = replace(run, incident_messages=without(run.incident_messages, "FellBack"))
    if is_new and not restored and not replaced:
        run = replace(run, incident_messages={**run.incident_messages, reason: text})
        if incident.kind is IncidentKind.FELL_BACK:
            run = replace(run, fell_back=(part, incident.attempt))
    return run, (RunEvent(reason=reason, message=text, warning=not restored, key=key),)


def _with_part(run: WatchedRun, report: Report, part: str, *, is_reporter: bool, now_s: float) -> WatchedRun:
    before = run.parts.get(part, NO_PART)
    after = replace(before, attempt=max(before.attempt, report.pod.attempt))
    if is_reporter and report.run is not None:
        after = _with_state(after, report.run, report.pod.attempt > before.attempt, now_s)
        after = replace(after, kept=() if part else _newest_checkpoints(after, report.run, now_s))
        run = replace(run, ledger=run.ledger.with_attempts_opened(part, report.run.attempts_opened))
    commit = after.state.newest if after.state is not None else None
    # Only a newer commit by this workload clears Fenced: another workload's commits may be in the same log.
    newer = part in run.parts and after.seq > before.seq
    if newer and commit is not None and commit.attempt <= after.attempt:
        run = replace(run, incident_messages=without(run.incident_messages, "Fenced"))
    if after.attempt > before.attempt > 0:
        run = replace(run, incident_messages=without(run.incident_messages, "Fenced", "TrackingFault"))
    return replace(run, parts={**run.parts, part: after})


def _with_state(part: RunPart, state: RunReport, new_attempt: bool, now_s: float) -> RunPart:
    """Return the part with the state its reporter sent. `new_attempt`: the reporter has a newer attempt.

    Times are on the controller's clock: a wrong node clock would hide stale checkpoints or report fresh ones as stale.
    The reported age is used only for a commit that is older than the controller's knowledge of the part.
    """
    seq = state.newest.seq if state.newest is not None else 0
    # After a rewind the newest commit is an older one. Only the attempt that resumed from it can report that.
    if part.state is not None and seq < part.seq and not new_attempt:
        return part
    at_s = part.committed_at_s
    if part.state is None and not part.seq:
        at_s = now_s - state.newest_age_s if seq else 0.0
    elif seq > part.seq:
        at_s = now_s
    return replace(part, seq=seq, committed_at_s=at_s, state=replace(state, checkpoints=()))


def _newest_checkpoints(part: RunPart, state: RunReport, now_s: float) -> tuple[Mapping[str, Any], ...]:
    """Return the newest checkpoints. Their first known times are kept, because reports contain ages."""
    times = {each["seq"]: each["time"] for each in part.kept} | {part.seq: timestamp(part.committed_at_s)}
    found = []
    for each in sorted(state.checkpoints, key=lambda each: -each.seq):
        time = times.get(each.seq) or timestamp(now_s - each.age_s)
        pins = {"pins": [*each.pins]} if each.pins else {}
        found.append({"seq": each.seq, "step": each.step, "time": time, "bytes": each.bytes, **pins})
    return tuple(found)
