"""Process of the controller.

`deltashard-controller` is on standby until it holds the Lease (`lease`): it serves its pages and its port, answers
reports with 421 and is ready. The leader loads the CheckpointRuns, watches (`object_watch`), receives reports
(`service`), nudges sidecars (`nudge`) and issues certificates (`authority`). HTTP pages: /livez (the event loop runs),
/healthz (the controller works) and /metrics. On SIGTERM or SIGINT it stops the watches, rejects reports, writes pending
statuses, releases the Lease and exits 0.
"""

from __future__ import annotations

import asyncio
import collections
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from deltashard_checkpoint.process import ANY_ADDRESS, listen
from prometheus_client import CollectorRegistry, ProcessCollector

from deltashard_operator import VERSION
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.controller.controller import Controller
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.nudge import Nudger
from deltashard_operator.fleet.service import BoundedListener, ReportServer
from deltashard_operator.fleet.token_review import Reviewer
from deltashard_operator.kube.api_access import ApiAccess, api_access
from deltashard_operator.kube.call import Caller
from deltashard_operator.kube.lease import DURATION_S, REQUEST_S, Lease
from deltashard_operator.kube.object_watch import STALE_S, ObjectWatch
from deltashard_operator.main import Serving, options_of, run
from deltashard_operator.status_page import pages
from deltashard_operator.tls.authority import Authority
from deltashard_operator.tls.certificate import Certificate

PROGRAM = "deltashard-controller"
LAG_TICK_S, LAG_TICKS = 0.25, 240
AGENT = f"{PROGRAM}/{VERSION}"
TaintKeys = tuple[str, ...]
_log = structlog.get_logger("deltashard.controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the controller."""

    host: str = ANY_ADDRESS  # bind address of both ports; `::`: all IPv4 and IPv6 addresses
    fleet_port: int = 9443  # TLS port that sidecars report to
    metrics_port: int = 9090  # plain port of /healthz, /livez and /metrics
    certificates: str = "builtin"
    """builtin: the leading controller issues the certificates of both programs; external: they are provided."""
    certificate_dir: Path = Path("/etc/deltashard/tls")
    """Directory with tls.crt and tls.key. The files may appear and change while serving."""
    namespace: str = "deltashard-system"  # namespace of the controller and of the certificates it issues
    watch_namespaces: tuple[str, ...] = ()  # comma-separated namespaces of the runs; empty: all
    default_policy: Path | None = None  # YAML file with the default policy's spec, as for the webhook
    kubeconfig: Path | None = None  # kubeconfig file; without it, the pod's service account
    keep_finished_days: float = 7.0
    """Days from the end of a workload to the deletion of its CheckpointRun. The checkpoints stay."""
    status_interval_s: float = 30.0
    """Interval of status writes for new commits. Changes of phase or conditions are written immediately."""
    identity: str = ""
    """Identity in the leader-election Lease; empty: the host name, which is the pod's name."""
    lease_s: float = DURATION_S  # another controller takes over after this time without renewal
    drain_s: float = 10.0  # time after SIGTERM to write pending statuses
    disruption_taints: TaintKeys = ()
    """Comma-separated keys of taints that, like a cordon, announce the end of a node."""
    annotate_pods: bool = False  # annotate pods with the time of their newest checkpoint
    log_level: str = "info"  # minimum level that is logged


class Process:
    """All components of the controller."""

    def __init__(self, options: Options, api: ApiAccess) -> None:
        self.options = options
        self.prometheus = CollectorRegistry()
        ProcessCollector(registry=self.prometheus)
        metrics = ControllerMetrics(self.prometheus)

        def count(verb: str, outcome: str) -> None:
            metrics.calls.labels(verb, outcome).inc()

        # A separate connection: a loss of the shared ones does not delay Lease renewals.
        always = Caller(api, count=count, connections=1, timeout_s=REQUEST_S)
        call = Caller(api, count=count, may_write=lambda: self.lease.held)
        reviews = Caller(api)
        self.calls = (always, call, reviews)
        self.lease = Lease(
            always,
            namespace=options.namespace,
            identity=options.identity or socket.gethostname(),
            duration_s=options.lease_s,
        )
        metrics.leading.set_function(lambda: int(self.lease.held))
        self.controller = Controller(
            call=call,
            defaults=Defaults(options.default_policy, None),
            metrics=metrics,
            keep_finished_s=options.keep_finished_days * 86400,
            status_interval_s=options.status_interval_s,
            namespaces=options.watch_namespaces,
            disruption_taints=options.disruption_taints,
            annotate_pods=options.annotate_pods,
        )
        watches = self.controller.watches
        self.watch = ObjectWatch(
            api,
            watches.kinds,
            namespaces=options.watch_namespaces,
            on_list=watches.on_list,
            count=lambda outcome, kind: metrics.watched.labels(outcome, kind).inc(),
        )
        metrics.watch_age.set_function(self.watch.staleness_s)
        self._lag_s = collections.deque([0.0], LAG_TICKS)
        metrics.loop_lag.set_function(lambda: max(self._lag_s))
        self.authority: Authority | None = None
        if options.certificates == "builtin":
            self.authority = Authority(call, options.namespace, self.prometheus)
        fleet_metrics = self.fleet_metrics = FleetMetrics(self.prometheus)
        self.reviewer = Reviewer(reviews, count=lambda outcome: fleet_metrics.reviews.labels(outcome).inc())
        self.certificate = Certificate(options.certificate_dir, "fleet", self.prometheus)
        self.fleet = ReportServer(
            handle_report=self.controller.report,
            reviewer=self.reviewer,
            certificate=self.certificate,
            metrics=fleet_metrics,
            leads=lambda: self.lease.held and not self.stopping,
            synced=lambda: self.controller.synced,
        )
        fleet_metrics.sidecars.set_function(lambda: self.controller.sidecars)
        self.nudger = Nudger(fleet_metrics)
        self.controller.set_nudger(self.nudger.nudge)
        self.stopping = False

    def unready(self) -> list[str]:
        """Return the reasons why the controller does not work. A standby with a leader elsewhere is ready."""
        was_leader, refused, authority = self.lease.was_leader, self.lease.refused, self.authority
        reasons = (
            ("sidecars cannot report: there is no certificate yet", self.certificate.loaded is None),
            (f"the API denies access to the leader-election Lease: {refused}", refused),
            ("the initial lists of objects are not complete yet", was_leader and not self.controller.synced),
            ("the watches receive nothing from the API", was_leader and self.watch.staleness_s() > STALE_S),
            (
                "the webhook's authority is not published yet",
                was_leader and authority and not authority.checked,
            ),
            ("no controller is known to lead yet", not was_leader and not self.lease.other_leader_seen),
            ("stopping", self.stopping),
        )
        return [reason for reason, is_so in reasons if is_so]

    async def serve(self) -> None:
        """Serve until a signal, then drain."""
        options, serving, front = self.options, Serving(), self.certificate.front
        try:
            plain = pages(self.prometheus, unready=self.unready)
            await serving.listen(plain, listen(options.host, options.metrics_port))
            reports = BoundedListener(listen(options.host, options.fleet_port), self.fleet_metrics)
            await serving.listen(self.fleet.application, reports, front)
            _log.info("controller.serving", port=options.fleet_port, metrics_port=options.metrics_port)
            serving.start(self.certificate.watch(), "certificate")
            serving.start(self._measure_lag(), "lag")
            leading = serving.start(self._lead(serving), "lead")
            await serving.stop.wait()
            self.stopping = True
            _log.info("controller.stopping")
            leading.cancel()  # new facts would prolong the drain
            await asyncio.wait([leading])
            serving.check()
            if self.lease.held:
                await self.controller.drain(options.drain_s)
            serving.check()
            _log.info("controller.stopped")
        finally:
            await serving.close()
            await self.lease.release()
            for each in self.calls:
                await each.close()

    async def _lead(self, serving: Serving) -> None:
        await self.lease.acquire()
        serving.start(self.lease.keep(), "lease")
        if self.authority is not None:
            serving.start(self.authority.run(), "authority")
        await self.controller.load()
        serving.start(self.nudger.run(), "nudges")
        serving.start(self.controller.pump(), "pump")
        _log.info("controller.leading")
        async with asyncio.TaskGroup() as group:
            group.create_task(self.controller.watches.resolve_forever())
            await self.watch.run()

    async def _measure_lag(self) -> None:
        while True:
            due_s = time.monotonic() + LAG_TICK_S
            await asyncio.sleep(LAG_TICK_S)
            self._lag_s.append(max(time.monotonic() - due_s, 0.0))


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(Options, PROGRAM, argv)

    async def work() -> None:
        await Process(options, api_access(options.kubeconfig, AGENT)).serve()

    return run(PROGRAM, options.log_level, work())


if __name__ == "__main__":
    sys.exit(main())
