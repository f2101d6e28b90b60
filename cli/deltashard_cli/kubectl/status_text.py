"""Text for a CheckpointRun's decisions, problems and losses. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import Any

from deltashard_cli.output import age, plural

Document = Mapping[str, Any]
NEWEST_LOSSES = 5


def parse_timestamp(text: object) -> float | None:
    """Convert an API timestamp to Unix seconds; return None if it is missing."""
    if not isinstance(text, str) or not text:
        return None
    return dt.datetime.fromisoformat(text).timestamp()


def ago(text: object, now_s: float) -> str:
    at_s = parse_timestamp(text)
    return "" if at_s is None else age(at_s, now_s)


def interval(status: Document) -> str:
    timers = []
    if status.get("intervalSeconds"):
        timers.append(f"{status['intervalSeconds']} s")
    if status.get("everySteps"):
        timers.append(f"{status['everySteps']} steps")
    if timers:
        return "every " + " or ".join(timers)
    return "on demand" if "intervalSeconds" in status else "not reported yet"


def problem_conditions(run: Document) -> list[Document]:
    """Return the conditions that report a problem, including a `Ready` that is not True."""
    conditions = (run.get("status") or {}).get("conditions") or ()
    return [
        each
        for each in conditions
        if (each["status"] != "True" if each["type"] == "Ready" else each["status"] == "True")
    ]


def decision_lines(run: Document) -> Iterator[str]:
    decisions = (run.get("status") or {}).get("decisions") or ()
    if not decisions:
        stated = f"set by the policy {run['spec']['policy']} or an annotation"
        yield f"Saves: {interval(run.get('status') or {})}, {stated}."
        return
    for each in decisions:
        goal = f", for the goal {each['goal']}" if each.get("goal") else ""
        proposed = each.get("proposed", "")
        value = f"{str(each['subject']).capitalize()}: {each.get('value') or 'not reported yet'}"
        yield f"{value}{goal}."
        if proposed and proposed != each.get("value"):
            yield f"  The rule proposes {proposed}."
        for name, text in (("Because", "why"), ("Bound:", "bound"), ("Evidence:", "evidence")):
            if each.get(text):
                yield f"  {name} {each[text]}."
        if each.get("unreachable"):
            yield f"  The goal is unreachable: {each['unreachable']}."


def problem_lines(run: Document, now_s: float) -> Iterator[str]:
    found = problem_conditions(run)
    if not found:
        yield "No problems."
    for each in found:
        since = ago(each.get("lastTransitionTime"), now_s).removesuffix(" ago")
        name = "Not ready" if each["type"] == "Ready" else each["type"]
        message = each.get("message") or each.get("reason", "")
        yield f"{name} for {since or 'a while'}: {message}"


def loss_lines(run: Document, now_s: float) -> Iterator[str]:
    status = run.get("status") or {}
    losses = list(status.get("losses") or ())
    if not losses:
        yield "No losses."
        return
    for each in reversed(losses[-NEWEST_LOSSES:]):
        where = f" on {each['node']}" if each.get("node") else ""
        message = f": {each['message']}" if each.get("message") else ""
        yield f"{ago(each['time'], now_s)}: {each['cause']}, pod {each.get('pod', '?')}{where}{message}"
    if len(losses) > NEWEST_LOSSES:
        yield f"and {len(losses) - NEWEST_LOSSES} older ones in the CheckpointRun"
    restores, steps = int(status.get("restores", 0)), int(status.get("lostSteps", 0))
    yield f"Total: {plural(restores, 'restore')}, {plural(steps, 'step')} repeated."
