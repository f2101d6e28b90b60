"""The page on the Prometheus metrics."""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.fleet import service
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.observed_object import Workload
from deltashard_operator.run.watched_run import Progress, WatchedRun
from deltashard_operator.tls.authority import Authority
from deltashard_operator.tls.certificate import Certificate
from deltashard_proto.v1.fleet_pb2 import Decision, Measured
from deltashard_sidecar.arena.block import Use
from deltashard_sidecar.telemetry import metric
from prometheus_client import CollectorRegistry, Metric

from tools.reference_pages.markdown import document, head, section, sentence, table

CLOSED_SETS = frozenset({"outcome", "verb", "phase", "kind", "use"})
"""Labels whose values are registered at the start, and are listed on the page."""
PROCESS = "process_"
"""Metrics of every Python process that prometheus_client measures."""


def page() -> str:
    return document(_lines())


def _lines() -> Iterator[str]:
    yield from head(
        "Metrics",
        "For engineers who build dashboards and alerts on deltashard.",
        "sidecar/deltashard_sidecar/telemetry/metric.py",
        "operator/deltashard_operator",
    )
    sidecar = list(_sidecar())
    yield from section(
        "## Sidecar",
        """
        Served at `/metrics` of the port `metrics_port`. These metrics also describe the trainer, which has no
        endpoint. A counter's name ends in `_total`; a histogram has the series `_bucket`, `_sum` and `_count`;
        times are in seconds.

        A series with labels appears with its first event: an absent counter is 0. In a run of several pods, the
        sidecar of rank 0 serves all metrics, and the other sidecars serve only those marked *Every pod*. `cause` is
        one of the [causes](errors.md#causes), unless its row lists other values.
        """,
    )
    yield from _table(sidecar, marked={family.name for family in metric.Metrics().collect()})
    yield from section(
        "## Controller",
        """
        Served at `/metrics` of the controller's metrics port. `deltashard_controller_*` describes its own work,
        `deltashard_fleet_*` the service that receives the sidecars' reports, and `deltashard_authority_*` its
        certificate authority. The process metrics of the Python client are served in addition
        (`process_cpu_seconds_total`, `process_resident_memory_bytes`, ...).
        """,
    )
    yield from _table(_controller())
    yield from section(
        "## Runs",
        """
        Served by the controller for every run that has not ended. The label `run` is the workload's name, or the
        name of the CheckpointRun if two workloads have the same name. A value that is not known yet is absent.
        """,
    )
    yield from _table(_runs())
    yield from section(
        "## Webhook",
        "Served at `/metrics` of the webhook's metrics port, with the process metrics of the Python client.",
    )
    yield from _table(_webhook())


def _table(families: Iterable[Metric], *, marked: Container[str] = ()) -> Iterator[str]:
    rows = []
    for family in families:
        total = "_total" if family.type == "counter" else ""
        labels = _labels_of(family)
        values = "".join(f"\n`{label}`: {', '.join(sorted(each))}." for label, each in labels.items() if each)
        cell = f"{family.type}\n{', '.join(f'`{label}`' for label in labels)}"
        text = sentence(family.documentation) + " *Every pod.*" * (family.name in marked)
        rows.append((f"`{family.name}{total}`", cell, text + values))
    yield from table(("name", "type, labels", "meaning"), rows)


def _labels_of(family: Metric) -> dict[str, set[str]]:
    """Return the labels; with all values, if they are a closed set."""
    names: tuple[str, ...] = family._labelnames  # noqa: SLF001 - the client has no public name for it
    values = {
        label: {each.labels[label] for each in family.samples if label in each.labels} for label in names
    }
    return {
        label: found if label in CLOSED_SETS and len(found) > 1 else set() for label, found in values.items()
    }


def _families(registry: CollectorRegistry) -> Iterator[Metric]:
    """Yield all families of a registry, by name, with their labels."""
    collectors = registry._names_to_collectors  # noqa: SLF001
    for family in sorted(registry.collect(), key=lambda each: each.name):
        if not family.name.startswith(PROCESS):
            if not hasattr(family, "_labelnames"):
                family._labelnames = collectors[family.name]._labelnames  # type: ignore[attr-defined]  # noqa: SLF001
            yield family


def _sidecar() -> Iterator[Metric]:
    made = metric.Metrics()
    made.has_rank0 = True
    made.watch_blocks(lambda: dict.fromkeys(uses, 0), uses := [each.value for each in Use])
    instruments = {family.name: family for family in _families(made.registry)}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(metric, "CPU_STAT", Path(folder) / "cpu.stat"),
    ):
        metric.CPU_STAT.write_text("throttled_usec 0\n")
        for family in sorted(made.collect(), key=lambda each: each.name):
            yield instruments.get(family.name, family)


def _controller() -> Iterator[Metric]:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    fleet = FleetMetrics(registry)
    for outcome in ("accepted", service.TOO_MANY_CONNECTIONS, *service.OUTCOMES):
        fleet.reports.labels(outcome)
    Certificate(Path(), "fleet", registry)
    Authority(_no_call, "deltashard", registry)
    return _families(registry)


async def _no_call(*_arguments: Any) -> Any:
    raise NotImplementedError


def _runs() -> Iterator[Metric]:
    registry = CollectorRegistry()
    one = Decision(subject="interval")
    measured = Measured(cost_s=1, step_s=1)
    run = WatchedRun(
        workload=Workload(namespace="team", kind="Job", name="train", uid="1"),
        conditions=(Condition(type="Stale", status="True", reason="Stale"),),
        training_since_s=1,
    )
    progress = Progress(last_commit_at_s=1, last_step=1, measured=measured, decisions=(one,))
    ControllerMetrics(registry).register_runs(lambda: [replace(run, progress=progress)])
    return (family for family in _families(registry) if family.name.startswith("deltashard_run"))


def _webhook() -> Iterator[Metric]:
    made = WebhookMetrics()
    Certificate(Path(), "webhook", made.registry)
    return _families(made.registry)
