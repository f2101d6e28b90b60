"""images/Dockerfile matches the cluster's images, installs pinned packages only, and no more than the code imports."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

import pytest
from deltashard_operator.admission import sidecar_container
from deltashard_operator.kube import cluster_name

from tests.integration.images import dockerfile
from tests.support.published import PUBLISHED, Published
from tests.support.server.minio_server import ROOT

pytestmark = pytest.mark.timeout(600)

STAGES = dockerfile.read(ROOT / "images" / "Dockerfile")
FINAL = [pytest.param(each, id=each.target) for each in PUBLISHED]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UV = os.environ.get("UV") or str(ROOT / ".bootstrap" / "bin" / "uv")


@cache
def _lists() -> dict[str, str]:
    """Return what `images/requirements` exports, by image."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [str(ROOT / "images" / "requirements"), folder],
            check=True,
            env=os.environ | {"UV": UV},
            timeout=240,
        )
        paths = Path(folder).glob("requirements-*.txt")
        return {path.stem.removeprefix("requirements-"): path.read_text() for path in paths}


def _requirements(name: str) -> dict[str, list[str]]:
    text = _lists()[name]
    entries = re.findall(r"(?m)^([a-z0-9._-]+)==\S+.*?\\\n((?:    --hash=\S+(?: \\)?\n)+)", text)
    return {name: re.findall(r"sha256:[0-9a-f]{64}", hashes) for name, hashes in entries}


def _names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9._-]+", each)[0].lower() for each in requirements}  # type: ignore[index]


def test_one_final_stage_for_each_image() -> None:
    used = {stage.base for stage in STAGES.values()}
    copied = set(re.findall(r"--from=(\S+)", (ROOT / "images" / "Dockerfile").read_text()))
    assert {each.target for each in PUBLISHED} == set(STAGES) - used - copied


@pytest.mark.parametrize("image", FINAL)
def test_image_entrypoint_matches_cluster_tests(image: Published) -> None:
    """Entry point, user, search path and files of the image equal those of the cluster tests."""
    stages = dockerfile.lineage(STAGES, image.target)
    assert dockerfile.arguments(dockerfile.last(stages, "ENTRYPOINT")) == image.entrypoint
    assert dockerfile.last(stages, "USER") == f"{cluster_name.USER_ID}:{cluster_name.USER_ID}"
    assert dockerfile.variables(stages)["PATH"].split(":")[0] == "/opt/deltashard/bin"
    copies = [text.split() for text in STAGES[image.target].all("COPY")]
    assert [f"--from={image.target}-environment", "/opt/deltashard", "/opt/deltashard"] in copies
    files: dict[str, str] = {}
    for *sources, target in (each for each in copies if not each[0].startswith("--from")):
        for source in sources:
            files[f"{target}{Path(source).name}" if target.endswith("/") else target] = source
    assert files == dict(image.files)


def test_sidecar_image_runs_injected_program() -> None:
    """The container that the webhook injects names a program of the image, which serves by default."""
    stages = dockerfile.lineage(STAGES, "sidecar")
    assert dockerfile.arguments(dockerfile.last(stages, "ENTRYPOINT")) == (sidecar_container.COMMAND,)
    assert dockerfile.arguments(dockerfile.last(stages, "CMD")) == ("serve",)
    scripts = PROJECT["project"]["scripts"]
    (webhook,) = dockerfile.arguments(dockerfile.last(dockerfile.lineage(STAGES, "operator"), "CMD"))
    assert {sidecar_container.COMMAND, webhook, "deltashard"} <= set(scripts)


def test_everything_is_installed_by_hash() -> None:
    """Only the wheel of the earlier stage has no hash. Dependencies are not resolved."""
    commands = [text for stage in STAGES.values() for text in stage.all("RUN") if "install" in text.split()]
    assert len(commands) == 1 + 2 * len(PUBLISHED)
    for command in commands:
        assert "--no-deps" in command
        assert "--require-hashes" in command or "--no-index /wheels/*.whl" in command
    for name in ("build", *(each.target for each in PUBLISHED)):
        found = _requirements(name)
        assert found, name
        assert all(found.values()), name
        assert len(found) == len(set(re.findall(r"(?m)^([a-z0-9._-]+)==", _lists()[name]))), name


def test_each_image_has_only_needed_packages() -> None:
    """Each image has its extras' packages. Only the example has torch, and the operator has no heavy packages."""
    extras, base = PROJECT["project"]["optional-dependencies"], PROJECT["project"]["dependencies"]
    sidecar, operator, example = (set(_requirements(n)) for n in ("sidecar", "operator", "example"))
    served = [name for extra in ("sidecar", "cli", "s3", "cloud") for name in extras[extra]]
    assert sidecar >= _names(served + base)
    assert operator >= _names(extras["operator"] + base)
    assert example >= _names(extras["trainer"] + base)
    assert "torch" in example
    assert not {"torch", "numba", "llvmlite"} & (sidecar | operator)
    assert not {"numpy", "minio"} & operator
    for target in ("sidecar", "example"):  # a missing native kernel is an error, not a slow start
        assert dockerfile.variables([STAGES[target]])["DELTASHARD_KERNELS"] == "native"
        assert any("DELTASHARD_KERNELS=native" in text for text in STAGES[f"{target}-environment"].all("RUN"))


def test_copied_sources_reach_builder() -> None:
    """Sources exist, and .dockerignore includes them. The tests' wheel has the same sources."""
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignored[0] == "*"
    sources = {
        source
        for stage in STAGES.values()
        for text in stage.all("COPY")
        if not text.startswith("--from")
        for source in text.split()[:-1]
    }
    exported = {f"images/requirements-{name}.txt" for name in _lists()}
    sources = {source.replace("${EXAMPLE}", "example") for source in sources}
    assert exported <= sources
    for source in sources:
        assert source in exported or (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignored, source
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored[1:] if pattern[0] != "!")
    where = PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]
    assert sources >= {*where, "pyproject.toml", "setup.py", "README.md", "LICENSE"}


BLOCKED = """
import importlib.metadata, json, pkgutil, sys
allowed = set(json.loads(sys.argv[1]))
of = importlib.metadata.packages_distributions()
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        dists = {each.lower().replace("_", "-") for each in of.get(top, [])} - {"deltashard"}
        if dists and not dists & allowed:
            raise ImportError(f"{name} is not in the image")
sys.meta_path.insert(0, Blocker())
for package in json.loads(sys.argv[2]):
    __import__(package)
    for module in pkgutil.walk_packages(sys.modules[package].__path__, package + "."):
        if not module.name.startswith(("deltashard_cli.dcp.", "deltashard_cli.kubectl.")):
            __import__(module.name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize(
    ("target", "packages"),
    [
        ("sidecar", ["deltashard_sidecar", "deltashard_cli", "deltashard_proto"]),
        ("operator", ["deltashard_operator"]),  # it has messages of the contract only, without gRPC
        ("example", ["deltashard"]),
    ],
)
def test_image_modules_import_with_installed_packages(target: str, packages: list[str]) -> None:
    """All packages outside the image's list are hidden.

    `deltashard_cli.dcp` uses torch's own format: its commands import torch when they run and report a missing torch.
    `deltashard_cli.kubectl` is a plugin for a user's machine and reports missing packages.
    """
    allowed = sorted(_requirements(target))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCKED, json.dumps(allowed), json.dumps(packages)],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("torch" in json.loads(done.stdout)) == (target == "example")
