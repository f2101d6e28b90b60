"""Every YAML, kubectl, helm and deltashard snippet of docs/kubernetes is valid, and quoted errors are the code's."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import click
import pytest
import yaml
from deltashard_cli import main as command_line
from deltashard_cli.kubectl.plugin import plugin
from deltashard_operator.admission.injection import check_marked, inject
from deltashard_operator.admission.run_holder import RunClaim, RunHolders
from deltashard_operator.admission.webhook import not_watched
from deltashard_operator.api import annotation, policy_cache, workload_policy
from deltashard_operator.api.refusal import CODES, Refusal
from deltashard_operator.kube import cluster_name, run_identity
from deltashard_operator.run.observed_object import Workload

from tests.support import helm
from tests.support.operator import sample
from tests.support.operator.definition import DEFINITIONS, serving
from tests.support.operator.example import DEFAULTS
from tests.support.server.apiserver import Rest
from tests.support.tool import ROOT, require_tool

Document = dict[str, Any]
FOLDER = ROOT / "docs" / "kubernetes"
PAGES = sorted(FOLDER.rglob("*.md"))
PROGRAMS = {"deltashard", "helm", "kubectl"}
SHELL_WORDS = {"until", "while", "do", "then", "if", "!"}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
API = "deltashard.io/v1alpha1"
OUR_RESOURCE = re.compile(r"(cluster)?checkpoint[a-z]+|ck[a-z]+")
FOREIGN_FIELDS = {
    "coveredResources",
    "excludeResourcePrefixes",
    "failurePolicy",
    "fsGroupPolicy",
    "maxRestarts",
    "pytorchReplicaSpecs",
    "replicatedJobs",
    "resourcePolicy",
    "containerPolicies",
    "containerName",
    "ruleNamespaceSelector",
    "ruleSelector",
}
"""Fields of JobSet, PyTorchJob, Kueue, the autoscaler and the Prometheus operator."""


@dataclass(frozen=True, slots=True)
class KubernetesSnippet:
    """A block or a code span of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text[:200]}"


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a snippet, without shell syntax."""

    place: str
    words: tuple[str, ...]
    whole: bool
    """Whether a user can copy it: a block's command, not a code span that omits arguments."""


def blocks() -> Iterator[KubernetesSnippet]:
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text[: match.start()].count("\n") + 1
            yield KubernetesSnippet(str(page.relative_to(FOLDER)), line, match[2], textwrap.dedent(match[3]))


def spans() -> Iterator[KubernetesSnippet]:
    for page in PAGES:
        text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
        for match in re.finditer(r"`([^`]+)`", text):
            line = text[: match.start()].count("\n") + 1
            yield KubernetesSnippet(str(page.relative_to(FOLDER)), line, "", " ".join(match[1].split()))


def commands() -> Iterator[Command]:
    for block in blocks():
        if block.language in {"", "sh", "console"}:
            text = block.text.replace("\\\n", " ")
            if re.search(r"(?m)^\$ ", text):
                text = "\n".join(re.findall(r"(?m)^\$ (.*)", text))
            for line in text.splitlines():
                if block.language != "console" or line.split(" ")[0] in PROGRAMS:
                    yield from commands_of_line(line, f"{block.page}:{block.line}", whole=True)
    for span in spans():
        if span.text.split(" ")[0] in PROGRAMS and " " in span.text:
            text = re.sub(r"\\\|[\w-]+|[\[\]]", "", span.text) if "[-" in span.text else span.text
            yield from commands_of_line(re.sub(r" N\b", " 1", text), f"{span.page}:{span.line}", whole=False)


def commands_of_line(line: str, place: str, *, whole: bool) -> Iterator[Command]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word and set(word) <= set(";|&"):
            yield from _nested(words, place, whole)
            words = []
        else:
            words.append(word)


def _nested(words: list[str], place: str, whole: bool) -> Iterator[Command]:
    """Yield the command of one part of a line, and the command that `kubectl exec` runs."""
    while words and words[0] in SHELL_WORDS:
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    if not words or words[0] not in PROGRAMS:
        return
    if "--" in words:
        at = words.index("--")
        yield from _nested(words[at + 1 :], place, whole)
        words = words[:at]
    yield Command(place, tuple(words), whole)


def parse_with_click(group: click.Group, words: tuple[str, ...], *, whole: bool) -> None:
    """Parse a command without running it. Raises a click error for an unknown command, flag or value."""
    if not words:
        assert not whole
        return
    context = click.Context(group)
    command = group.get_command(context, words[0])
    if command is None:
        raise click.UsageError(f"no such command: {words[0]}")
    arguments = list(words[1:])
    for at, word in enumerate(arguments[:-1]):
        if word == "-f" and not whole:
            arguments[at + 1] = "-"
    try:
        command.make_context(words[0], arguments, parent=context).close()
    except click.MissingParameter:
        if whole:
            raise


@cache
def output_of(tool: str, *words: str) -> str:
    done = subprocess.run([str(require_tool(tool)), *words], check=True, capture_output=True, text=True)
    return done.stdout


def check_flags(tool: str, words: tuple[str, ...], verb: tuple[str, ...]) -> None:
    text = output_of(tool, *verb, "--help") + (output_of("kubectl", "options") if tool == "kubectl" else "")
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text.partition("\nUsage:")[0][-20000:] + text))
    for word in words:
        if re.match(r"--?[a-zA-Z]", word):
            flag = word.partition("=")[0]
            assert flag in known, f"{' '.join(verb)} has no flag {flag}"


def check_helm(words: tuple[str, ...]) -> None:
    verb = words[1]
    assert f"\n  {verb} " in output_of("helm", "--help"), f"helm has no command {verb}"
    check_flags("helm", words[2:], (verb,))
    values = tuple(words[at + 1] for at, word in enumerate(words) if word == "--set")
    if values:
        sets = (part for each in values for part in ("--set", each.replace("$registry", "registry")))
        helm.run("template", helm.RELEASE, helm.CHART, "--kube-version", helm.VERSION, *sets)


@cache
def resource_names() -> set[str]:
    names: set[str] = set()
    for definition in definitions():
        found = definition["spec"]["names"]
        names |= {found["plural"], found["singular"], *found.get("shortNames", ())}
    return names


def definitions() -> Iterator[Document]:
    for path in DEFINITIONS:
        yield yaml.safe_load(path.read_text())


def properties(
    schema: Mapping[str, Any], above: str = "", root: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield the dotted paths of a schema's fields. An array has its items' fields."""
    root = root or schema
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        schema = {**target, **schema}
    if "items" in schema:
        yield from properties(schema["items"], above, root)
    for name, each in schema.get("properties", {}).items():
        yield above + name
        yield from properties(each, f"{above}{name}.", root)


@cache
def field_paths() -> set[str]:
    """Return the fields of our kinds and of the chart's values; a policy's also without `spec`."""
    found = set(properties(json.loads((helm.CHART / "values.schema.json").read_text())))
    for definition in definitions():
        for version in definition["spec"]["versions"]:
            paths = set(properties(version["schema"]["openAPIV3Schema"]))
            found |= paths | {each.removeprefix("spec.") for each in paths}
    return found


def check_kubectl(words: tuple[str, ...], *, whole: bool) -> None:
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        rest = rest[2:]
    if rest[0] == "deltashard":
        parse_with_click(plugin, tuple(rest[1:]), whole=whole)
        return
    depth = {"auth": 2, "create": 2, "rollout": 2, "config": 2}.get(rest[0], 1) + (rest[1:2] == ["secret"])
    check_flags("kubectl", words[1:], tuple(rest[:depth]) if whole or len(rest) >= depth else (rest[0],))
    ours = False
    for word in rest[1:]:
        for name in re.split(r"[,/.]", word.split("/")[0]) if not word.startswith("-") else ():
            if OUR_RESOURCE.fullmatch(name):
                ours = True
                assert name in resource_names(), f"there is no resource {name}"
    names = {part for path in field_paths() for part in path.split(".")} | {"items", "metadata", "name"}
    for template in re.findall(r"jsonpath=(.*)", "\n".join(words)) if ours else ():
        for name in re.findall(r"[.]([a-zA-Z]+)", template.replace('"', " ")):
            assert name in names | {"namespace"}, f"no field {name}"
    for at, word in enumerate(words):
        if word == "-p":
            json.loads(words[at + 1])


def check(command: Command) -> None:
    if command.words[0] == "helm":
        check_helm(command.words)
    elif command.words[0] == "kubectl":
        check_kubectl(command.words, whole=command.whole)
    else:
        parse_with_click(command_line.cli, command.words[1:], whole=command.whole)


def test_commands_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs, subcommands, flags and values exist; the parsers are those of the programs themselves."""
    monkeypatch.chdir(ROOT)
    wrong, programs = [], dict.fromkeys(PROGRAMS, 0)
    for command in commands():
        programs[command.words[0]] += 1
        try:
            check(command)
        except (AssertionError, click.ClickException, helm.HelmError, ValueError) as error:
            why = error.format_message() if isinstance(error, click.ClickException) else error
            wrong.append(f"{command.place}: {' '.join(command.words)}: {why}")
    assert wrong == []
    assert min(programs.values()) > 10


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    with serving(tmp_path_factory.mktemp("apiserver")) as server, server.http() as rest:
        yield rest


def full_object(part: Document) -> Document | None:
    """Return an object of the API that has this part of a manifest, or None for another kind of snippet."""
    if "kind" in part:
        return None if part["kind"] == "Kustomization" else part
    if set(part) == {"spec"}:
        return {"apiVersion": API, "kind": "CheckpointPolicy", "metadata": {"name": "p"}, **part}
    if "containers" in part:
        spec = {**part, "containers": [{"image": "trainer", **each} for each in part["containers"]]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    return None


def check_yaml(part: Document, http: Rest) -> None:
    """Check one document as its reader does: the API server, the webhook, Helm or the controller."""
    document = full_object(part)
    if document is not None:
        document["metadata"].pop("namespace", None)  # the server has only the namespace `default`
        reply = http.create(document, dry_run=True, strict=True)
        assert (reply.status, reply.warnings) == (201, []), reply.document.get("message")
    elif set(part) == {"metadata"}:
        annotation.read({cluster_name.POLICY: "default", **part["metadata"]["annotations"]})
    elif "kind" in part:  # a kustomization, which changes the default policy
        for each in part["patches"]:
            data = yaml.safe_load(each["patch"])["data"]
            workload_policy.read(
                "default", workload_policy.merged(yaml.safe_load(data["policy.yaml"]), DEFAULTS)
            )
    else:
        helm.render(part)


def test_yaml_is_valid(http: Rest) -> None:
    """Our kinds on a real API server with the chart's definitions, values by the chart's schema."""
    wrong, checked = [], 0
    for block in blocks():
        if block.language != "yaml":
            continue
        for part in yaml.safe_load_all(block.text):
            checked += 1
            try:
                check_yaml(part, http)
            except Exception as error:  # all wrong snippets are reported at once
                wrong.append(f"{block}: {error}")
    assert wrong == []
    assert checked > 10


def test_annotations_exist() -> None:
    known = {*annotation.KEYS, cluster_name.CHECKPOINT_TIME, cluster_name.INJECTED, API}
    for page in PAGES:
        for name in re.findall(r"deltashard\.io/[a-z0-9-]+(?=[`:=\s}\]])", page.read_text()):
            assert name in known, f"{page.name}: {name}"


def test_field_names_exist(http: Rest) -> None:
    """A code span that is a path, such as `sidecar.resources`, or one camelCase word names an existing field."""
    definitions = json.loads(http.text("/openapi/v2"))["definitions"].values()
    words = {name for each in definitions for name in each.get("properties", ())} | FOREIGN_FIELDS
    ours = {part for path in field_paths() for part in path.split(".")}
    roots = {path.partition(".")[0] for path in field_paths()} - {"metadata"}
    wrong = []
    for span in spans():
        name = span.text.partition(":")[0].replace("[]", "")
        if not re.fullmatch(r"[a-z][a-zA-Z]*([.][a-zA-Z*]+)*", name) or name.endswith(
            (".md", ".yaml", ".json")
        ):
            continue
        first, *rest = name.split(".")
        if rest and first in roots and not set(name.split(".")) <= words | {"*"}:
            wrong += [] if name in field_paths() else [str(span)]
        elif re.search(r"[a-z][A-Z]", name) and not set(name.split(".")) <= words | ours | {"*"}:
            wrong.append(str(span))
    assert wrong == []


class StoredRuns:
    """An API that has one CheckpointRun and no Job."""

    def __init__(self, run: Document) -> None:
        self._run = run

    async def list_all(self, path: str, **_selector: str) -> list[Document]:
        return [self._run] if path.endswith("checkpointruns") else []


def moved_run() -> Refusal | None:
    run = {
        "metadata": {"name": "nightly-0b4f3c1e"},
        "spec": {"runId": "nightly", "workload": {"kind": "Job", "name": "nightly", "uid": "u"}},
        "status": {"store": "s3://checkpoints/x", "phase": "Finished"},
    }
    holders = RunHolders(StoredRuns(run))  # type: ignore[arg-type]
    return asyncio.run(holders.refusal(RunClaim(namespace="team-a", run_id="nightly"), "s3://new/x"))


def injected(policy: Document | None = None, metadata: Document | None = None, **spec: Any) -> Document:
    template = {**sample.template(**spec), "metadata": metadata or {}}
    return inject(template, sample.policy(policy, run_id="nightly"), run_identity.JOB)


def trainer(**fields: Any) -> Document:
    return injected(containers=[{"name": "trainer", **fields}])


REFUSED: Mapping[str, Callable[[], object]] = {
    "BadAnnotation": lambda: annotation.read({cluster_name.POLICY: "default", cluster_name.ENCODING: "q5"}),
    "BadPolicy": lambda: injected({"interval": {"goal": {"type": "Auto"}, "min": "2h", "max": "1h"}}),
    "BadTemplate": lambda: injected(containers=[{"image": "trainer"}]),
    "ContainerNameTaken": lambda: injected(containers=[{"name": "deltashard-sidecar"}]),
    "CopiedManifest": lambda: check_marked(
        injected(), annotation.Annotations(policy="default", run_id="weekly"), run_identity.JOB
    ),
    "MarkerWithoutSidecar": lambda: injected(metadata={"annotations": {cluster_name.INJECTED: "0.1.0"}}),
    "MountTaken": lambda: trainer(volumeMounts=[{"name": "scratch", "mountPath": "/run/deltashard"}]),
    "NamespaceNotWatched": lambda: not_watched("team-c"),
    "PodResourcesTooSmall": lambda: injected(
        containers=[{"name": "trainer", "resources": {"requests": {"memory": "3Gi"}}}],
        resources={"limits": {"memory": "4Gi"}},
    ),
    "PolicyNotFound": lambda: workload_policy.not_found("nightly", default=False),
    "PolicyUnavailable": lambda: policy_cache.unavailable("nightly", "503"),
    "RunIdTaken": lambda: RunClaim(namespace="team-a", run_id="nightly").held_by(
        Workload(namespace="team-a", kind="Job", name="nightly-29012345", uid="u", api_version="batch/v1")
    ),
    "StoreMoved": moved_run,
    "VariableTaken": lambda: trainer(env=[{"name": "DELTASHARD_SOCKET", "value": "/tmp/socket"}]),
    "VolumeUnsupported": lambda: injected(volumes=[{"name": "deltashard-shm", "emptyDir": {}}]),
    "Unsupported": lambda: injected(os={"name": "windows"}),
}


@pytest.mark.parametrize("code", CODES)
def test_quoted_errors_are_those_of_the_code(code: str) -> None:
    page = (FOLDER / "troubleshooting.md").read_text()
    (quoted,) = re.findall(rf"```console\n(.* \({code}\))\n```", page)
    try:
        found = REFUSED[code]()
    except Refusal as refusal:
        found = refusal
    assert isinstance(found, Refusal)
    assert found.sentence == quoted
