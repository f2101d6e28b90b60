"""The process of the controller: options, clients, watches, sockets, signals.

`deltashard-controller` stands by until it has the Lease (`lease`): it serves its pages and its port, answers reports
with 421 and is ready. Who leads reads the CheckpointRuns, watches (`object_watch`), takes reports (`service`), nudges
sidecars (`nudge`) and issues certificates (`authority`). Plain pages: /livez (the loop turns, and every watch is
tended), /healthz (besides, the API is heard and sidecars can report) and /metrics. On SIGTERM or SIGINT it ends its
watches, closes its port, writes what is not written yet, lets go of the Lease and exits 0; a second signal hurries it.
Every flag is also a variable: `--metrics-port` is `DELTASHARD_CONTROLLER_METRICS_PORT`.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import socket
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from deltashard_checkpoint.process import EVERY_ADDRESS, listen
from kubernetes import client
from prometheus_client import CollectorRegistry, ProcessCollector

from deltashard_operator import VERSION
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.controller.controller import Controller
from deltashard_operator.controller.event import Teller
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.fleet.nudge import Nudger
from deltashard_operator.fleet.service import ReportServer
from deltashard_operator.fleet.token_review import Reviewer
from deltashard_operator.kube.call import ApiUnavailable, Caller
from deltashard_operator.kube.lease import DURATION_S, LeaderOnly, Lease
from deltashard_operator.kube.object_watch import ObjectWatch
from deltashard_operator.kube.watch_session import STALE_S
from deltashard_operator.main import api_client, options_of, run, signals
from deltashard_operator.status_page import pages
from deltashard_operator.tls.authority import Authority, AuthorityOptions
from deltashard_operator.tls.certificate import Certificate
from deltashard_operator.tls.metric import AuthorityMetrics, CertificateMetrics

MAX_LAG_S = 10.0
"""A loop this late is stuck."""
LAG_TICK_S = 0.25
LAG_WINDOW_S = 60.0
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
USER_AGENT = f"deltashard-controller/{VERSION}"
"""What audit logs and managedFields call it."""
TaintKeys = tuple[str, ...]
DISRUPTION_TAINTS = (
    "karpenter.sh/disrupted",
    "ToBeDeletedByClusterAutoscaler",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "aws-node-termination-handler/rebalance-recommendation",
)
"""Taints by which others announce a node's end; few of them cordon it."""
_log = structlog.get_logger("deltashard.controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be set on the controller."""

    host: str = EVERY_ADDRESS
    """Address both ports bind; `::` is every one of IPv4 and IPv6."""
    fleet_port: int = 9443
    """TLS port that sidecars report to."""
    metrics_port: int = 9090
    """Plain port of /healthz, /livez and /metrics."""
    certificates: str = "builtin"
    """builtin: the controller that leads issues the certificate of controller and webhook; external: somebody else."""
    certificate_dir: Path = Path("/etc/deltashard/tls")
    """Directory with tls.crt and tls.key; they may appear and change while serving."""
    namespace: str = "deltashard-system"
    """The controller's own, where the certificates it issues are kept."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces whose runs it keeps, by commas; empty: all."""
    default_policy: Path | None = None
    """YAML file with the default policy's spec, the same as the webhook's."""
    kubeconfig: Path | None = None
    """How to reach the API; without, as a pod."""
    keep_finished_days: float = 7.0
    """A CheckpointRun is removed so long after its workload ended. The checkpoints stay."""
    status_interval_s: float = 30.0
    """Between writes of a run's status for new commits; a change of phase or condition is written at once."""
    identity: str = ""
    """What it is called in the Lease that keeps two controllers apart; empty: the host's name, which is the pod's."""
    lease_s: float = DURATION_S
    """A controller that is silent for so long is followed by another."""
    drain_s: float = 10.0
    """How long unwritten statuses are written after SIGTERM."""
    annotate_pods: bool = False
    """Whether pods bear the time of their run's newest checkpoint (`true`); it needs the right to patch them."""
    disruption_taints: TaintKeys = DISRUPTION_TAINTS
    """Keys of taints, by commas, that announce a node's end as a cordon does."""
    log_level: str = "info"
    """The least that is logged."""


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    return options_of(Options, "deltashard-controller", argv, environ)


class Lag:
    """How late the loop is. `run` it as a task."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, float]] = collections.deque()
        self._turned_s = time.monotonic()

    async def run(self) -> None:
        while True:
            due_s = time.monotonic() + LAG_TICK_S
            await asyncio.sleep(LAG_TICK_S)
            now_s = self._turned_s = time.monotonic()
            self._seen.append((now_s, max(now_s - due_s, 0.0)))
            while self._seen[0][0] < now_s - LAG_WINDOW_S:
                self._seen.popleft()

    def now_s(self) -> float:
        """How long ago it turned last, beyond what it should be."""
        return max(time.monotonic() - self._turned_s - LAG_TICK_S, 0.0)

    def worst_s(self) -> float:
        return max((late for _, late in self._seen), default=0.0)


class Process:
    """All parts of the controller, put together."""

    def __init__(self, options: Options, api: client.ApiClient) -> None:
        self.options = options
        self._api = api
        api.user_agent = USER_AGENT
        self.prometheus = CollectorRegistry()
        ProcessCollector(registry=self.prometheus)
        self.metrics = metrics = ControllerMetrics(self.prometheus)
        self.call = Caller(api, count=lambda verb, outcome: metrics.calls.labels(verb, outcome).inc())
        self.lease = Lease(
            self.call,
            namespace=options.namespace,
            identity=options.identity or socket.gethostname(),
            duration_s=options.lease_s,
        )
        metrics.leading.set_function(lambda: int(self.lease.held))
        writing: Any = LeaderOnly(self.call, lambda: self.lease.held)
        self.teller = Teller(writing, count=lambda outcome: metrics.events.labels(outcome).inc())
        metrics.events_waiting.set_function(lambda: len(self.teller))
        self.controller = Controller(
            call=writing,
            leads=lambda: self.lease.held,
            teller=self.teller,
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
            count=metrics.watched,
        )
        self.freshness = self.watch.freshness
        metrics.watch_age.set_function(self.freshness.heard_s)
        self.lag = Lag()
        metrics.loop_lag.set_function(self.lag.worst_s)
        self.authority: Authority | None = None
        if options.certificates == "builtin":
            self.authority = Authority(
                writing,
                AuthorityOptions(namespace=options.namespace),
                metrics=AuthorityMetrics(self.prometheus),
            )
        fleet_metrics = FleetMetrics(self.prometheus)
        self.reviewer = Reviewer(api, count=fleet_metrics.reviewed)
        self.fleet = ReportServer(
            ledger=self.controller,
            reviewer=self.reviewer,
            certificate=Certificate(options.certificate_dir, CertificateMetrics("fleet", self.prometheus)),
            metrics=fleet_metrics,
            leads=lambda: self.lease.held and self.controller.loaded and not self.stopping,
        )
        self.nudger = Nudger(fleet_metrics)
        self.controller.follow(self.nudger.nudge)
        self.stopping = False

    # -- pages -------------------------------------------------------------------------------------------------------

    def dead(self) -> list[str]:
        """Why a restart is the remedy; empty while it is not."""
        watching = self.controller.loaded and not self.stopping
        untended = self.freshness.untended() if watching else ()
        reasons = [f"nobody tends the watch of {path}" for path in untended]
        if self.lag.now_s() > MAX_LAG_S:
            reasons.append(f"the loop is {self.lag.now_s():.0f} s late")
        return reasons

    def unready(self) -> list[str]:
        """Why it does not do its work, which is no more than to stand by while another leads."""
        reasons = [*self.dead(), *self.fleet.unready()]
        if self.lease.refused:
            reasons.append(
                f"the API does not let it have the Lease that one must hold to write: {self.lease.refused}"
            )
        if self.lease.led and not self.controller.synced:
            reasons.append("not everything that there is was seen yet")
        if self.lease.led and self.freshness.heard_s() > STALE_S:
            reasons.append("the API is not heard")
        if self.lease.led and self.authority is not None and not self.authority.checked:
            reasons.append("the webhook's authority is not published yet")
        if not self.lease.led and not self.lease.followed:
            reasons.append("no controller was seen to lead yet")
        if self.stopping:
            reasons.append("stopping")
        return reasons

    # -- life --------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read what was known before; tries until the API answers."""
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            try:
                await self.controller.load()
            except ApiUnavailable as error:
                _log.warning("controller.not_loaded", error=str(error))
                await asyncio.sleep(pause_s)
            else:
                return

    async def serve(self) -> None:
        """Serve until a signal, then drain."""
        stop, hurry = signals()
        runner = web.AppRunner(pages(self.prometheus, dead=self.dead, unready=self.unready), access_log=None)
        await runner.setup()
        tasks: list[asyncio.Task[None]] = []

        def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(lambda _: stop.set())  # none ends but by a fault or because we stop
            tasks.append(task)
            return task

        try:
            await web.SockSite(runner, listen(self.options.host, self.options.metrics_port)).start()
            await self.fleet.start(self.options.host, self.options.fleet_port)
            _log.info("controller.serving", metrics_port=runner.addresses[0][1], port=self.fleet.port)
            start(self.lag.run(), "lag")
            if not await _unless(stop, self.lease.acquire()):
                return
            start(self.lease.keep(), "lease")
            if self.authority is not None:
                start(self.authority.run(), "authority")
            if not await _unless(stop, self.load()):
                return
            start(self.teller.run(), "events")
            start(self.nudger.run(), "nudges")
            start(self.controller.pump(), "pump")
            watching = (
                start(self.controller.watches.settle_for_ever(), "settle"),
                start(self.watch.run(), "watch"),
            )
            _log.info("controller.leading")
            await stop.wait()
            self.stopping = True
            _log.info("controller.stopping")
            for task in watching:  # new facts would keep the drain from its end
                task.cancel()
            await self.fleet.stop()
            if not _ended(tasks):
                await _unless(hurry, self._drain(watching))
            for task in _ended(tasks):
                task.result()
            _log.info("controller.stopped")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.fleet.stop()
            await self.lease.release()
            self.call.close()
            self.reviewer.close()
            await runner.cleanup()

    async def _drain(self, watching: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.wait(watching)
        await self.controller.drain(self.options.drain_s)


def _ended(tasks: Sequence[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    """Those that ended, but not because we cancelled them."""
    return [task for task in tasks if task.done() and not task.cancelled()]


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do it; False when the event came before its end."""
    task = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if done := task.done():
        task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `deltashard-controller`."""
    options = read_options(sys.argv[1:] if argv is None else argv, os.environ)

    async def work() -> None:
        await Process(options, api_client(options.kubeconfig)).serve()

    return run("deltashard-controller", options.log_level, work())


if __name__ == "__main__":
    sys.exit(main())
