"""`kubectl deltashard`: explain the runs of a cluster, show their logs, and rewind them.

kubectl runs the executable `kubectl-deltashard` from the PATH; it also works standalone. Exit codes are those of
`deltashard`. It reads CheckpointRuns, pods and logs with the user's permissions; only `rewind` creates an object.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import click
import yaml
from deltashard_checkpoint.errors import EnvironmentFault, UserError
from rich.text import Text

from deltashard_cli.kubectl import container_log, injection, run_choice, status_text, store_job
from deltashard_cli.kubectl.cluster import Cluster, NotFound
from deltashard_cli.main import run_group
from deltashard_cli.option import ended_option, json_option, named_option
from deltashard_cli.output import console, print_json

POLL_S = 0.5
Document = Mapping[str, Any]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deltashard")
def plugin() -> None:
    """Inspect the checkpointed runs of a cluster.

    RUN is the name of a CheckpointRun or of its workload, or the run id.
    """


def with_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Add the cluster's options; the command receives `cluster`."""

    @click.option("-n", "--namespace", metavar="NAME", help="Default: the context's namespace, else default.")
    @click.option("--context", metavar="NAME", help="Context of the kubeconfig.")
    @click.option(
        "--kubeconfig", type=click.Path(path_type=Path, dir_okay=False), help="Default: that of kubectl."
    )
    @functools.wraps(command)
    def found(*, kubeconfig: Path | None, context: str | None, namespace: str | None, **options: Any) -> None:
        command(cluster=Cluster(kubeconfig=kubeconfig, context=context, namespace=namespace), **options)

    return found


def with_run(command: Callable[..., None]) -> Callable[..., None]:
    """Add RUN, --json and the cluster's options; the command receives `cluster` and the document `run`."""

    @click.argument("name", metavar="RUN")
    @json_option
    @with_cluster
    @functools.wraps(command)
    def found(*, cluster: Cluster, name: str, **options: Any) -> None:
        command(cluster=cluster, run=run_choice.find_run(cluster.runs(), name, cluster.namespace), **options)

    return found


@plugin.command()
@click.option("-f", "--filename", type=click.File("rb"), required=True, help="Manifests in YAML; - is stdin.")
@with_cluster
def inject(*, cluster: Cluster, filename: IO[bytes]) -> None:
    """Print manifests with the sidecar that deltashard would inject, without creating anything.

    Calls the cluster's webhook by a dry run, which needs the permission to create the objects. Manifests without the
    annotation are printed unchanged.
    """
    try:
        documents = [each for each in yaml.safe_load_all(filename) if each]
    except yaml.YAMLError as error:
        raise UserError(f"invalid YAML: {error}"[:300], where=filename.name) from error
    made = [injection.injected(cluster, each) for each in documents]
    click.echo(yaml.safe_dump_all(made, sort_keys=False), nl=False)


@plugin.command()
@with_run
def why(*, cluster: Cluster, run: Document, as_json: bool) -> None:  # noqa: ARG001
    """Explain a run's decisions, problems and losses."""
    status = _status(run)
    if as_json:
        kept = {key: status.get(key, []) for key in ("decisions", "conditions", "losses")}
        print_json({"run": run["metadata"]["name"], **kept})
        return
    out, now_s = console(), time.time()
    for title, lines in (
        ("Decisions", status_text.decision_lines(run)),
        ("Problems", status_text.problem_lines(run, now_s)),
        ("Losses", status_text.loss_lines(run, now_s)),
    ):
        out.print(Text(title, style="bold"))
        for line in lines:
            out.print(Text(f"  {line}"))


@plugin.command()
@click.option("--tail", type=click.IntRange(1, 100_000), default=50, show_default=True, help="Lines per log.")
@click.option("--pod", metavar="NAME", help="Only this pod.")
@click.option(
    "-c",
    "--container",
    type=click.Choice(("all", "trainer", "sidecar")),
    default="all",
    show_default=True,
    help="Only these containers.",
)
@click.option("-p", "--previous", is_flag=True, help="Logs from before the containers' last restart.")
@with_run
def logs(
    *,
    cluster: Cluster,
    run: Document,
    tail: int,
    pod: str | None,
    container: str,
    previous: bool,
    as_json: bool,
) -> None:
    """Show the newest log lines of the trainer and the sidecar of each pod of a run.

    Unreadable logs are reported and skipped.
    """
    found = list(container_log.logs(cluster, run, tail=tail, previous=previous, pod=pod, container=container))
    if as_json:
        print_json(found)
    else:
        out = console()
        for each in found:
            name = f"{each.pod}/{each.container}" if each.container else each.pod
            out.print(Text(f"==> {name} <==", style="bold"))
            out.print(Text(f"unavailable: {each.error}", style="red") if each.error else Text(each.text))
        if not found:
            out.print("the CheckpointRun names no pod yet")
    if found and all(each.error for each in found):
        raise EnvironmentFault("no log could be read", where=run["metadata"]["name"])


@plugin.command()
@named_option
@ended_option
@click.option("--dry-run", is_flag=True, help="Print the Job without creating it.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1, 3600),
    default=300,
    show_default=True,
    help="Seconds to wait.",
)
@with_run
def rewind(
    *, cluster: Cluster, run: Document, which: str, ended: bool, dry_run: bool, timeout_s: int, as_json: bool
) -> None:
    """Rewind a stopped run to an older checkpoint, from which it then resumes training.

    A Job in the namespace runs `deltashard rewind` with the store credentials of the run's pods. Suspend the workload
    first.
    """
    _require_stopped(run)
    words = ["rewind", "--checkpoint", which, *(["--ended"] if ended else [])]
    made = store_job.manifest(run, _template(cluster, run), words, name=f"{run['metadata']['name']}-rewind")
    if dry_run:
        click.echo(json.dumps(made, indent=2))
        return
    namespace = run["metadata"]["namespace"]
    job = cluster.create(f"/apis/batch/v1/namespaces/{namespace}/jobs", made)["metadata"]["name"]
    result = _result(cluster, namespace, job, timeout_s)
    if as_json:
        print_json({"run": run["metadata"]["name"], "job": job, **result})
    else:
        console().print(Text(str(result["output"]).strip() or f"job {job} ended without output"))
    if result["exit"]:
        click.get_current_context().exit(int(result["exit"]))


def _status(run: Document) -> Document:
    found: Document = run.get("status") or {}
    return found


def _require_stopped(run: Document) -> None:
    """Raise `UserError` for a run with a live pod: its next save would be based on the current checkpoint."""
    living = [
        each["name"]
        for each in _status(run).get("pods") or ()
        if not each.get("lost") and each.get("phase") not in {"Succeeded", "Failed"}
    ]
    if run_choice.is_over(run) or not living:
        return
    workload = run["spec"]["workload"]
    suspend = f'kubectl patch job {workload["name"]} -p \'{{"spec":{{"suspend":true}}}}\''
    queued = "with Kueue, spec.active of its Workload to false instead"
    raise UserError(
        f"the run is training, in {', '.join(living[:3])}",
        where=run["metadata"]["name"],
        remedy=f"suspend it first: {suspend} ({queued})"
        if workload["kind"] == "Job"
        else f"stop {workload['kind']} {workload['name']} first",
    )


def _template(cluster: Cluster, run: Document) -> Document:
    """Return the pod spec with the run's sidecar, from its Job's template or from one of its pods."""
    namespace, workload = run["metadata"]["namespace"], run["spec"]["workload"]
    paths = [f"/api/v1/namespaces/{namespace}/pods/{each['name']}" for each in _status(run).get("pods") or ()]
    if workload["kind"] == "Job":
        paths.insert(0, f"/apis/batch/v1/namespaces/{namespace}/jobs/{workload['name']}")
    for path in paths:
        try:
            found = cluster.get(path)
        except NotFound:
            continue
        spec = found["spec"]
        template: Document = spec["template"]["spec"] if "template" in spec else spec
        return template
    place = f"{namespace}/{run['spec']['runId']}"
    raise UserError(
        "no store credentials: neither the run's Job nor one of its pods exists",
        where=run["metadata"]["name"],
        remedy=f"with your own credentials: deltashard rewind s3://BUCKET/PREFIX --run {place} -c WHICH",
    )


def _result(cluster: Cluster, namespace: str, job: str, timeout_s: float) -> dict[str, Any]:
    """Return output and exit code of the Job's container. Raises `EnvironmentFault` if it does not end in time."""
    ends_s = time.monotonic() + timeout_s
    place = f"/api/v1/namespaces/{namespace}/pods"
    while True:
        for pod in cluster.select(place, f"batch.kubernetes.io/job-name={job}"):
            for each in (pod.get("status") or {}).get("containerStatuses") or ():
                ended = (each.get("state") or {}).get("terminated")
                if ended is not None:
                    output = cluster.text(
                        f"{place}/{pod['metadata']['name']}/log", {"container": each["name"]}
                    )
                    return {"output": output, "exit": int(ended["exitCode"])}
        if time.monotonic() > ends_s:
            raise EnvironmentFault(
                f"the Job did not end within {timeout_s:.0f} s",
                where=f"{namespace}/{job}",
                remedy=f"see the reason by kubectl describe job {job}; cancel by kubectl delete job {job}",
            )
        time.sleep(POLL_S)


def main(arguments: list[str] | None = None) -> None:
    run_group(plugin, arguments, name="kubectl deltashard")


if __name__ == "__main__":
    main()
