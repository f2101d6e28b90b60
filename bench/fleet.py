"""`make bench-fleet`: 5,000 annotated pods on a real control plane, measured; out/fleet.json and a table.

Half of the pods are runs of one pod, the others belong to runs of 64.

kwok simulates the kubelets. API server, Job controller, webhook over TLS and the controller with the rights of the
chart are real. Each of 5,000 simulated sidecars sends its reports over TLS with a separate token. All processes share
the machine, so the times are those of a control plane that is short of CPU.

Times do not fail the run. One write to an object of a user in the audit log does. The run takes about ten minutes on
two cores.
    bench/fleet.py                        5,000 pods
    bench/fleet.py --pods 500             a tenth as many, for trying it out
    bench/fleet.py --sizes 5              1,000 runs of five pods
    bench/fleet.py --metadata-only ...    pods without a spec, of Jobs without a controller
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from measuring import cpu_model
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.load.simulation import admission, workload  # noqa: E402
from tests.load.simulation import measure as measures  # noqa: E402
from tests.load.simulation.process import Usage  # noqa: E402
from tests.load.simulation.system import LoadSystem  # noqa: E402

NODES = 100
SAVE_REQUESTS = 200
"""Runs that get a save request at the same time."""
EVERY_S = 120.0
"""Time between two commits of a run."""
ADMISSIONS_PER_S = 50.0
ADMISSION_DURATION_S = 60.0
STEADY_S = 45.0
MIB = 1 << 20


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def between(before: dict[str, Usage], after: dict[str, Usage], seconds: float) -> dict[str, Any]:
    return {
        name: {
            "cores": round((usage.cpu_s - before[name].cpu_s) / seconds, 3),
            "rss_mib": usage.rss_bytes // MIB,
            "peak_rss_mib": usage.peak_rss_bytes // MIB,
            "threads": usage.threads,
            "files": usage.files,
        }
        for name, usage in after.items()
    }


def steady(system: LoadSystem) -> dict[str, Any]:
    usages, reported, requests = system.usages(), system.swarm.report(), system.requests()
    begun_s = time.monotonic()
    time.sleep(STEADY_S)
    elapsed_s = time.monotonic() - begun_s
    after = system.swarm.report()
    requested = system.requests()
    return {
        "seconds": round(elapsed_s, 1),
        "reports_per_s": round((after["reports"] - reported["reports"]) / elapsed_s, 1),
        "requests_per_s": {
            what: round((count - requests.get(what, 0)) / elapsed_s, 2)
            for what, count in requested.items()
            if count > requests.get(what, 0)
        },
        "programs": between(usages, system.usages(), elapsed_s),
    }


def losses(system: LoadSystem) -> dict[str, Any]:
    by_run = {pod.job_uid: pod for pod in workload.live_pods(system.plane)}
    victims = list(by_run.values())
    found: dict[str, Any] = {}
    share = len(victims) // 10
    for name, how, chosen in (
        ("evicted", workload.evict, victims[:share]),
        ("killed", workload.kill, victims[share : 2 * share]),
    ):
        begun_s = time.monotonic()
        found[name] = measures.spread(system.lose(chosen, how))
        system.wait_reported(system.pods)
        system.view.wait_training(system.runs)
        found[name]["all_training_again_s"] = round(time.monotonic() - begun_s, 1)
    return found


def save_requests(system: LoadSystem) -> dict[str, Any]:
    runs = list({pod.job_uid: pod for pod in workload.live_pods(system.plane)}.values())
    report_delays, over = system.request_saves(runs[:SAVE_REQUESTS])
    return {
        "runs": len(report_delays),
        "order_to_report_s": measures.spread(report_delays),
        "order_to_end_s": measures.spread(over),
    }


def admissions(system: LoadSystem) -> dict[str, Any]:
    before = system.usages()
    outcome = admission.admit(
        system.plane, system.webhook.metrics, per_s=ADMISSIONS_PER_S, duration_s=ADMISSION_DURATION_S
    )
    return {
        "asked_per_s": ADMISSIONS_PER_S,
        "reached_per_s": round(len(outcome.latencies_s) / outcome.elapsed_s, 1),
        "max_lateness_s": outcome.max_lateness_s,
        "failed": len(outcome.failures),
        "failures": outcome.failures[:5],
        "webhook_s": {"p50": outcome.webhook.quantile(0.5), "p99": outcome.webhook.quantile(0.99)},
        "apiserver_calls_webhook_s": {
            "p50": outcome.hooks.quantile(0.5),
            "p99": outcome.hooks.quantile(0.99),
        },
        "client_s": measures.spread(outcome.latencies_s),
        "programs": between(before, system.usages(), outcome.elapsed_s),
    }


def restart_storm(system: LoadSystem) -> dict[str, Any]:
    reported, page = system.swarm.report(), system.plane.metrics()
    jobs = {pod.job_uid for pod in workload.live_pods(system.plane)}
    failures = {uid: system.view.status(uid).get("failures", 0) for uid in jobs}
    took_s = system.restart()
    after, name = system.swarm.report(), "apiserver_request_duration_seconds"
    labels = {"resource": "tokenreviews", "verb": "POST"}
    reviews = measures.histogram(system.plane.metrics(), name, **labels).since(
        measures.histogram(page, name, **labels)
    )
    refusals = {
        cause: count - reported["refusals"].get(cause, 0)
        for cause, count in after["refusals"].items()
        if count > reported["refusals"].get(cause, 0)
    }
    return {
        "seconds": {key: round(value, 1) for key, value in took_s.items()},
        "refused_meanwhile": refusals,
        "report_s": measures.spread(after["report_s"]),
        "token_reviews": reviews.count,
        "token_review_s": {"p50": reviews.quantile(0.5), "p99": reviews.quantile(0.99)},
        "losses_invented": sum(
            system.view.status(uid).get("failures", 0) != count for uid, count in failures.items()
        ),
        "controller": asdict(system.controller.usage()),
    }


STEPS = {
    "steady": steady, "losses": losses, "orders": save_requests, "admissions": admissions, "restart": restart_storm,
    "steady_after": steady,
}  # fmt: skip
NEED_JOBS = {"losses", "admissions"}
"""Steps that create pods again."""


def write(found: dict[str, Any]) -> None:
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    (out / "fleet.json").write_text(json.dumps(found, indent=1))


def distribute_sizes(pods: int, sizes: Sequence[int]) -> list[int]:
    """Return sizes of runs with about `pods` pods in total, split equally between the given sizes."""
    return [size for size in sizes for _ in range(max(1, round(pods / len(sizes) / size)))]


def measure(sizes: Sequence[int], *, metadata_only: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "machine": machine(),
        "pods": sum(sizes),
        "runs": len(sizes),
        "runs_by_pods": {str(size): count for size, count in sorted(Counter(sizes).items())},
        "commit_every_s": EVERY_S,
    }
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        make = workload.make_pods if metadata_only else workload.make
        system = LoadSystem(Path(folder), sizes=sizes, nodes=NODES, every_s=EVERY_S, make=make)
        try:
            with system:
                found["setup_s"] = system.took_s
                found["controller_after"] = {what: asdict(u) for what, u in system.controller_after.items()}
                print(f"up: {system.took_s}", flush=True)
                write(found)
                for name, step in STEPS.items():
                    if metadata_only and name in NEED_JOBS:
                        continue
                    begun_s = time.monotonic()
                    found[name] = step(system)
                    print(f"{name}: {time.monotonic() - begun_s:.0f} s", flush=True)
                    write(found)  # keep the measurements, even if a later part fails
                found["programs"] = {name: asdict(usage) for name, usage in system.usages().items()}
                found["requests"] = system.requests()
                found["findings"] = system.violations()
        except BaseException:
            print(system.controller.process.tail(8000))
            raise
    return found


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    quiet, after, again = found["steady"], found["steady_after"], found["restart"]

    def ms(times: dict[str, float]) -> str:
        return f"{times['p50'] * 1e3:.0f} / {times['p99'] * 1e3:.0f} ms"

    def seconds(times: dict[str, float]) -> str:
        return f"{times['p50']:.1f} / {times['p99']:.1f} / {times['max']:.1f} s"

    controller, webhook = (found["programs"][f"deltashard-{name}"] for name in ("controller", "webhook"))
    at_rest = quiet["programs"]["deltashard-controller"]
    writes = sum(count for what, count in quiet["requests_per_s"].items() if "status" in what)
    table = [
        (
            "controller and webhook, memory, all sidecars reporting",
            f"{at_rest['rss_mib'] + webhook['rss_bytes'] // MIB} MiB",
        ),
        ("controller after its restart, peak", f"{controller['peak_rss_bytes'] // MIB} MiB"),
        ("controller, CPU while all train", f"{at_rest['cores']:.2f} cores"),
        ("reports taken", f"{quiet['reports_per_s']:.0f} per s"),
        ("statuses written", f"{writes:.1f} per s"),
        ("order to report, p50 / p99 / worst", seconds(found["orders"]["order_to_report_s"])),
        ("order to the request's end, p50 / p99 / worst", seconds(found["orders"]["order_to_end_s"])),
        ("controller killed: ready again", f"{again['seconds']['ready']:.1f} s"),
        ("controller killed: every run reported", f"{again['seconds']['every run reported']:.1f} s"),
        ("controller killed: all statuses right", f"{again['seconds']['runs training']:.1f} s"),
        ("token reviews of that, p50 / p99", f"{again['token_reviews']:.0f}, {ms(again['token_review_s'])}"),
        ("losses invented by that", str(again["losses_invented"])),
        ("controller, CPU after that", f"{after['programs']['deltashard-controller']['cores']:.2f} cores"),
        ("writes to users' objects", str(len(found["findings"]))),
    ]
    if requested := found.get("admissions"):
        used = requested["programs"]["deltashard-webhook"]
        table += [
            ("eviction to status, p50 / p99 / worst", seconds(found["losses"]["evicted"])),
            ("killed trainer to status, p50 / p99 / worst", seconds(found["losses"]["killed"])),
            ("admissions", f"{requested['reached_per_s']:.0f} per s, {requested['failed']} failed"),
            ("webhook, its own time, p50 / p99", ms(requested["webhook_s"])),
            ("webhook, as the API server sees it, p50 / p99", ms(requested["apiserver_calls_webhook_s"])),
            ("webhook, CPU and memory", f"{used['cores']:.2f} cores, {used['rss_mib']} MiB"),
        ]
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, default=5000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64], help="pods of a run")
    parser.add_argument("--metadata-only", action="store_true", help="pods made without the Job controller")
    options = parser.parse_args()
    found = measure(distribute_sizes(options.pods, options.sizes), metadata_only=options.metadata_only)
    write(found)
    table = Table(title=f"{found['pods']} annotated pods, {found['runs']} runs")
    table.add_column("what")
    table.add_column("", justify="right")
    for what, figure in rows(found):
        table.add_row(what, figure)
    Console().print(table)
    for violation in found["findings"]:
        print(f"the controller must not: {violation}", file=sys.stderr)
    return 1 if found["findings"] or found.get("admissions", {}).get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
