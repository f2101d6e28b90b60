"""examples/kubernetes: every manifest is what its kind's API takes, and is injected to what is on record.

A golden file, `tests/golden/examples/<manifest>.out.yaml`, is the Job or pod that the manifest's controller creates,
after its admission under policy.yaml. `DELTASHARD_GOLDEN=write` writes them anew: read the diff.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from deltashard_operator.admission.workload_kind import KINDS
from deltashard_operator.api.workload_policy import merged, read
from deltashard_operator.kube import cluster_name

from tests.support.operator.example import (
    DEFAULTS,
    EXAMPLES,
    MANIFESTS,
    POLICY,
    WORKLOADS,
    admitted,
    documents,
    injected,
)
from tests.support.operator.golden import annotated
from tests.support.published import MINIO, PUBLISHED
from tests.support.server.minio_server import ROOT

GOLDEN = ROOT / "tests" / "golden" / "examples"


def _id(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", WORKLOADS, ids=_id)
def test_an_example_is_injected_to_what_is_on_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the policy of the examples and the chart's defaults."""
    monkeypatch.setattr("deltashard_operator.admission.injection.VERSION", "0.1.0")
    result, golden = injected(path), GOLDEN / f"{path.stem}.out.yaml"
    if os.environ.get("DELTASHARD_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(yaml.safe_dump(result, sort_keys=False, width=110))
    assert result == yaml.safe_load(golden.read_text())


@pytest.mark.parametrize("path", WORKLOADS, ids=_id)
def test_an_example_has_its_line_where_the_table_says(path: Path) -> None:
    """At the place to recommend, and nowhere else; the policy it names is the one of policy.yaml."""
    manifest = documents(path)[0]
    kind = next(each for each in KINDS if each.kind == manifest["kind"])
    found = [place for place in kind.annotate_at if annotated(manifest, place.split("."))]
    assert found == [kind.annotate_at[0]]
    assert admitted(path)["kind"] == kind.injected_as
    said = re.findall(rf"{re.escape(cluster_name.POLICY)}: (\S+)", path.read_text())
    assert said == [POLICY["metadata"]["name"]]


def test_every_kind_has_an_example() -> None:
    """And each example of a workload is of a kind that is documented."""
    assert {each.kind for each in KINDS} == {documents(path)[0]["kind"] for path in WORKLOADS}


def test_images_and_arguments_exist() -> None:
    """An example names images that are published, and flags that the trainer has."""
    published = {each.name for each in PUBLISHED} | {MINIO}
    trainer = (EXAMPLES / "train.py").read_text()
    for path in MANIFESTS:
        text = path.read_text()
        assert set(re.findall(r"image: (\S+)", text)) <= published, path
        for flag in re.findall(r"(--[a-z-]+)=", " ".join(re.findall(r"args: (.*)", text))):
            assert f'"{flag}"' in trainer, flag


def test_exit_codes_are_those_of_the_trainer() -> None:
    """The rules of the podFailurePolicy, the comments and the scripts speak of the same codes."""
    from deltashard.attach import exit_code, term_signal

    manifest = documents(EXAMPLES / "job-pod-failure-policy.yaml")[0]
    rules = manifest["spec"]["podFailurePolicy"]["rules"]
    values = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert values == {"Ignore": [term_signal.EXIT_SIGTERM], "FailJob": [2, exit_code.EXIT_TAKEN_OVER]}
    assert manifest["spec"]["podReplacementPolicy"] == "Failed"
    assert manifest["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    job = documents(EXAMPLES / "job.yaml")[0]["spec"]
    assert "podFailurePolicy" not in job
    assert "podReplacementPolicy" not in job
    assert job["backoffLimit"] > 6, "the default would end a long training"
    for told in (EXAMPLES / "job.yaml").read_text(), (EXAMPLES / "train.py").read_text():
        assert f"{exit_code.EXIT_TAKEN_OVER}" in told
        assert f"{term_signal.EXIT_SIGTERM}" in told


def test_the_policy_is_one() -> None:
    """policy.yaml is read without a complaint, and its store is the MinIO of minio.yaml."""
    policy = read("baskets", merged(POLICY["spec"], DEFAULTS))
    secret, deployment, service = documents(EXAMPLES / "minio.yaml")
    port = service["spec"]["ports"][0]["port"]
    assert f"http://{service['metadata']['name']}:{port}" in policy.url
    bucket = deployment["spec"]["template"]["spec"]["initContainers"][0]["command"][-1].rpartition("/")[2]
    assert policy.url.startswith(f"s3://{bucket}/")
    assert set(secret["stringData"]) == {"MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"}
    volumes = documents(EXAMPLES / "reader.yaml")[0]["spec"]["volumes"]
    assert {"secretName": policy.store["secretRef"]["name"]} in [each.get("secret") for each in volumes]
