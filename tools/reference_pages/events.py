"""The page on the events of trainers, runs and logs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from deltashard.attach.attachment import EVENTS, FIELDS
from deltashard_operator.run.watched_run import EVENTS as KUBERNETES_EVENTS
from deltashard_operator.run.watched_run import NORMAL_EVENTS

from tools.reference_pages.log_events import OPERATOR, SIDECAR
from tools.reference_pages.markdown import document, head, section, table
from tools.reference_pages.source import ROOT, calls, strings


def page() -> str:
    return document(_lines())


def _lines() -> Iterator[str]:
    yield from head(
        "Events",
        "For authors of training scripts, and for engineers who watch runs and read logs.",
        "trainer/deltashard/attach/attachment.py",
        "operator/deltashard_operator/run/watched_run.py",
        "tools/reference_pages/log_events.py",
    )
    yield from section(
        "## Events of the trainer",
        """
        `Checkpointer(on_event=f)` calls `f(name, facts)` on the training thread. `facts` is a dict with the fields
        of the event. An exception of `f` is logged once and counted in `stats.event_errors`; training continues.
        """,
    )
    emitted = _emitted()
    rows = [(f"`{name}`", EVENTS[name], ", ".join(f"`{each}`" for each in emitted[name])) for name in EVENTS]
    yield from table(("event", "when", "fields"), rows)
    yield from section("### Fields")
    rows = []
    for key, text in FIELDS.items():
        event, _, field = key.rpartition(".")
        kind, _, meaning = text.partition(": ")
        rows.append((f"`{field}`" + f" of `{event}`" * bool(event), kind, meaning))
    yield from table(("field", "type", "meaning"), sorted(rows))
    yield from section(
        "### Causes of the trainer",
        """
        In addition to the [causes](errors.md#causes), `save_failed` has `gone` (the sidecar ended or restarted),
        `silent` (the sidecar does not answer), `state` (a value cannot be saved), `validate` (`validate=` raised)
        and `attempt not open` (the store takes no entry). In a group, `skipped` has `no group` (the group is lost)
        and `round cancelled` (the ranks did not agree in time).
        """,
    )
    yield from section(
        "## Kubernetes events",
        """
        The controller records these events for the workload and for its CheckpointRun: `kubectl describe` shows
        them, and `kubectl get events --field-selector reason=SaveFailed`. A sidecar's incident is recorded once,
        across restarts; any other event with the same text once in 10 minutes. At most 25 events of a run are
        recorded at once, then one a minute. A [condition](../kubernetes/troubleshooting.md#a-run-is-in-trouble)
        lasts as long as its problem.
        """,
    )
    kinds = {name: "Normal" if name in NORMAL_EVENTS else "Warning" for name in KUBERNETES_EVENTS}
    rows = [(f"`{reason}`", kinds[reason], meaning) for reason, meaning in KUBERNETES_EVENTS.items()]
    yield from table(("reason", "type", "when"), rows)
    yield from section(
        "## Log events",
        """
        Sidecar, webhook and controller log JSON lines on stderr, with the key `event`. Lines on errors also have
        the keys `error`, `what`, `where` and `remedy`, or a traceback for a bug, which please report.
        """,
    )
    for heading, listed in (("### Sidecar", SIDECAR), ("### Webhook and controller", OPERATOR)):
        yield from section(heading)
        rows = [(f"`{name}`", level, meaning) for name, (level, meaning) in listed.items()]
        yield from table(("event", "level", "meaning"), rows)


def _emitted() -> dict[str, list[str]]:
    """Return the fields of each event, from the calls that emit it."""
    found: dict[str, list[str]] = {}
    for call in calls(ROOT / "trainer" / "deltashard"):
        function = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        for name in strings(call.args[0]) if call.args else ():
            if function == "emit":
                found[name] = [each.arg for each in call.keywords if each.arg]
            elif function in {"report", "_report"} and isinstance(call.args[-1], ast.Dict):
                found[name] = [each for key in call.args[1].keys if key for each in strings(key)]
    assert found.keys() == EVENTS.keys(), f"EVENTS and the code differ in {found.keys() ^ EVENTS.keys()}"
    used = {
        each if each in FIELDS else f"{event}.{each}" for event, fields in found.items() for each in fields
    }
    assert used == FIELDS.keys(), f"FIELDS and the code differ in {used ^ FIELDS.keys()}"
    return found
