"""Process of the webhook, and what the webhook and controller share: options, clients, ports, signals.

`deltashard-webhook` serves until SIGTERM or SIGINT, then drains (see `webhook`) and exits 0.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from ssl import SSLContext
from typing import Any, TypeVar

import structlog
from aiohttp import web
from deltashard_checkpoint.errors import DeltashardError, UserError
from deltashard_checkpoint.process import ANY_ADDRESS, listen, raise_open_file_limit
from kubernetes import config

from deltashard_operator import VERSION
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.admission.run_holder import RunHolders
from deltashard_operator.admission.webhook import Webhook
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.policy_cache import PolicyCache
from deltashard_operator.kube import watched_namespace
from deltashard_operator.kube.api_access import ApiAccess, api_access
from deltashard_operator.kube.call import Caller
from deltashard_operator.kube.object_watch import ObjectWatch
from deltashard_operator.tls.certificate import Certificate

PROGRAM = "deltashard-webhook"
AGENT = f"{PROGRAM}/{VERSION}"
CONNECTIONS = 32
"""Maximum number of concurrent API connections for admissions."""
EXIT_FAILED = 1
"""The webhook or the controller failed, for example because the API stayed unavailable."""
EXIT_USAGE = 2
"""Options, permissions or files are wrong."""
SHUTDOWN_TIMEOUT_S = 2.0
"""Time for requests to finish when their server closes."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the webhook."""

    host: str = ANY_ADDRESS  # bind address of both ports; `::`: all IPv4 and IPv6 addresses
    port: int = 9443  # TLS port of /mutate
    metrics_port: int = 9090  # plain port of /healthz, /livez and /metrics
    certificate_dir: Path = Path("/etc/deltashard/tls")
    """Directory with tls.crt and tls.key. The files may appear and change while serving."""
    watch_namespaces: tuple[str, ...] = ()
    """Comma-separated namespaces to inject in; empty: all. Annotated workloads in other namespaces are rejected."""
    default_policy: Path | None = None  # YAML file with the default policy's spec
    fleet_ca: Path | None = None  # PEM file with the CA of the controller's report service
    kubeconfig: Path | None = None  # kubeconfig file; without it, the pod's service account
    drain_s: float = 10.0  # time after SIGTERM to keep answering admissions
    log_level: str = "info"  # minimum level that is logged


OPTION_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": {"true": True, "false": False}.get,
    "Path": Path,
    "Path | None": Path,
    "tuple[str, ...]": watched_namespace.parse_namespaces,
    "TaintKeys": lambda text: tuple(each.strip() for each in text.split(",") if each.strip()),
}
"""Parsers by the field's type annotation. Other types are text."""
CHOICES: Mapping[str, Sequence[object]] = {
    "certificates": ("builtin", "external"),
    "annotate_pods": (True, False),
    "log_level": ("debug", "info", "warning", "error"),
}


def options_of(kind: type[T], program: str, argv: Sequence[str] | None = None) -> T:
    """Parse options from the command line over the defaults of a dataclass. Exits on invalid arguments."""
    parser = argparse.ArgumentParser(
        prog=program, description=kind.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=OPTION_TYPES.get(str(field.type), str),
            choices=CHOICES.get(field.name),
            default=field.default,
            help=" ",
        )
    return kind(**vars(parser.parse_args(argv)))


class Serving:
    """Servers and background tasks of a program, running until a signal or the failure of a task."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """Set by SIGTERM, SIGINT or the failure of a task."""
        self._tasks: list[asyncio.Task[None]] = []
        self._runners: list[web.AppRunner] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine in the background. Its failure stops the program."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)
        self._tasks.append(task)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.stop.set()

    async def listen(
        self, application: web.Application, at: socket.socket, context: SSLContext | None = None
    ) -> None:
        """Serve an application on a listening socket. TLS handshakes fail until the context has a certificate."""
        runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S, handler_cancellation=True
        )
        self._runners.append(runner)
        await runner.setup()
        await web.SockSite(runner, at, ssl_context=context).start()

    def check(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for runner in self._runners:
            await runner.cleanup()


def run(program: str, log_level: str, work: Coroutine[Any, Any, None]) -> int:
    """Run a program's main coroutine and return the exit status. Logs are JSON lines on stderr."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    for name in ("kopf", "aiohttp"):  # kopf logs every watch
        logging.getLogger(name).setLevel(logging.WARNING)
    raise_open_file_limit()
    try:
        asyncio.run(work)
    except (DeltashardError, config.ConfigException, OSError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        mine = isinstance(error, DeltashardError) and not isinstance(error, UserError)
        return EXIT_FAILED if mine else EXIT_USAGE
    return 0


async def serve(options: Options, api: ApiAccess) -> None:
    """Serve until a signal, then drain."""
    metrics, call = WebhookMetrics(), Caller(api, connections=CONNECTIONS)
    cache = PolicyCache(call)
    watch = ObjectWatch(api, cache.kinds, namespaces=options.watch_namespaces, on_list=cache.on_list)
    webhook = Webhook(
        certificate=Certificate(options.certificate_dir, "webhook", metrics.registry),
        cache=cache,
        holders=RunHolders(call),
        defaults=Defaults(options.default_policy, options.fleet_ca),
        metrics=metrics,
        namespaces=options.watch_namespaces,
    )
    log = structlog.get_logger("deltashard.webhook")
    secure, plain = webhook.applications()
    serving = Serving()
    try:
        serving.start(webhook.certificate.watch(), "certificate")
        serving.start(watch.run(), "watch")
        await serving.listen(secure, listen(options.host, options.port), webhook.certificate.front)
        await serving.listen(plain, listen(options.host, options.metrics_port))
        log.info("webhook.serving", port=options.port, metrics_port=options.metrics_port)
        await serving.stop.wait()
        serving.check()
        webhook.draining = True
        log.info("webhook.draining", drain_s=options.drain_s)
        await asyncio.sleep(options.drain_s)
        log.info("webhook.stopped")
    finally:
        await serving.close()
        await call.close()


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(Options, PROGRAM, argv)

    async def work() -> None:
        await serve(options, api_access(options.kubeconfig, AGENT))

    return run(PROGRAM, options.log_level, work())


if __name__ == "__main__":
    sys.exit(main())
