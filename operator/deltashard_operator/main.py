"""The process of the webhook: options, clients, sockets, signals.

`deltashard-webhook` serves until SIGTERM or SIGINT, then drains (see `webhook`) and exits 0; a second signal ends the
draining. Every flag is also a variable: `--metrics-port` is `DELTASHARD_WEBHOOK_METRICS_PORT`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import structlog
from aiohttp import web
from deltashard_checkpoint.errors import DeltashardError, UserError
from deltashard_checkpoint.process import EVERY_ADDRESS, listen, raise_open_files
from kubernetes import client, config

from deltashard_operator import structured_logging
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.admission.run_holder import Holders
from deltashard_operator.admission.webhook import Webhook
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.policy_cache import PolicyCache
from deltashard_operator.kube import object_watch, watched_namespace
from deltashard_operator.kube.object_watch import ObjectWatch
from deltashard_operator.tls.certificate import Certificate

EXIT_FAILED, EXIT_USAGE = 1, 2
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be set on the webhook."""

    host: str = EVERY_ADDRESS
    """Address both ports bind; `::` is every one of IPv4 and IPv6."""
    port: int = 9443
    """TLS port of /mutate."""
    metrics_port: int = 9090
    """Plain port of /healthz, /livez and /metrics."""
    certificate_dir: Path = Path("/etc/deltashard/tls")
    """Directory with tls.crt and tls.key; they may appear and change while serving."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces whose workloads get a sidecar, by commas; empty: all. Elsewhere annotated ones are refused."""
    default_policy: Path | None = None
    """YAML file with the default policy's spec."""
    fleet_ca: Path | None = None
    """PEM file of the authority of the controller's report service."""
    kubeconfig: Path | None = None
    """How to reach the API; without, as a pod."""
    drain_s: float = 10.0
    """How long admissions are answered after SIGTERM."""
    log_level: str = "info"
    """The least that is logged."""


def _namespaces(text: str) -> tuple[str, ...]:
    """A list of namespaces, for argparse, which hides what a `ValueError` says."""
    try:
        return watched_namespace.listed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


OPTION_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: text == "true",
    "Path": Path,
    "Path | None": Path,
    "tuple[str, ...]": _namespaces,
    "TaintKeys": lambda text: tuple(each.strip() for each in text.split(",") if each.strip()),
}
"""How an option's text is read, by the type of its field; any other is text."""
CHOICES = {"certificates": ("builtin", "external"), "log_level": structured_logging.LEVELS}


def options_of(kind: type[T], program: str, argv: Sequence[str], environ: Mapping[str, str]) -> T:
    """Options from the command line over the environment over the defaults of a dataclass; exits on nonsense."""
    parser = argparse.ArgumentParser(prog=program, description=kind.__doc__)
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        variable = f"{program}_{field.name}".replace("-", "_").upper()
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=OPTION_TYPES.get(str(field.type), str),
            choices=CHOICES.get(field.name),
            default=environ.get(variable) or field.default,
            help=f"default {field.default}; variable {variable}",
        )
    return kind(**vars(parser.parse_args(argv)))


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    return options_of(Options, "deltashard-webhook", argv, environ)


def api_client(kubeconfig: Path | None) -> client.ApiClient:
    """A client of the API: by this kubeconfig, or as the pod's service account."""
    configuration = client.Configuration()
    if kubeconfig is None:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.retries = False
    return client.ApiClient(configuration)


def signals() -> tuple[asyncio.Event, asyncio.Event]:
    """What the first SIGTERM or SIGINT sets, and what the next one does."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop, hurry


def run(program: str, log_level: str, work: Coroutine[Any, Any, None]) -> int:
    """Do a program's work to its end; its exit status."""
    structured_logging.configure(log_level)
    raise_open_files()
    object_watch.quiet()
    try:
        asyncio.run(work)
    except (DeltashardError, config.ConfigException, OSError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        mine = isinstance(error, DeltashardError) and not isinstance(error, UserError)
        return EXIT_FAILED if mine else EXIT_USAGE
    return 0


async def serve(options: Options, api: client.ApiClient) -> None:
    """Serve until a signal, then drain."""
    metrics = WebhookMetrics()
    cache = PolicyCache(api, on_restart=metrics.watch_restarts.inc)
    watch = ObjectWatch(api, cache.kinds, namespaces=options.watch_namespaces, on_list=cache.on_list)
    webhook = Webhook(
        certificate=Certificate(options.certificate_dir, metrics.certificate),
        cache=cache,
        holders=Holders(api),
        defaults=Defaults(options.default_policy, options.fleet_ca),
        metrics=metrics,
        namespaces=options.watch_namespaces,
    )
    stop, hurry = signals()
    watching = asyncio.create_task(webhook.certificate.watch())
    watching.add_done_callback(lambda _: stop.set())  # it never ends but by a fault
    following = asyncio.create_task(watch.run())
    following.add_done_callback(lambda _: stop.set())
    secure, plain = (web.AppRunner(each, access_log=None) for each in webhook.applications())
    try:
        await secure.setup()
        await plain.setup()
        context = webhook.certificate.front
        await web.SockSite(secure, listen(options.host, options.port), ssl_context=context).start()
        await web.SockSite(plain, listen(options.host, options.metrics_port)).start()
        log = structlog.get_logger("deltashard.webhook")
        log.info("webhook.serving", port=secure.addresses[0][1], metrics_port=plain.addresses[0][1])
        await stop.wait()
        for task in (watching, following):
            if task.done():
                task.result()
        webhook.draining = True
        log.info("webhook.draining", drain_s=options.drain_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), options.drain_s)
        log.info("webhook.stopped")
    finally:
        watching.cancel()
        following.cancel()
        await asyncio.gather(watching, following, return_exceptions=True)
        await secure.cleanup()
        await plain.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `deltashard-webhook`."""
    options = read_options(sys.argv[1:] if argv is None else argv, os.environ)

    async def work() -> None:
        await serve(options, api_client(options.kubeconfig))

    return run("deltashard-webhook", options.log_level, work())


if __name__ == "__main__":
    sys.exit(main())
