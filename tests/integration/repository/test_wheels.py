"""The published wheel for every Python with its kernels, and the images' bills of materials."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cluster.kubernetes.image import wheel
from tests.support.tool import ROOT
from tools import wheels

PINNED = re.compile(r"(?m)^([a-z0-9._-]+)==(\S+)")
UV = os.environ.get("UV") or str(ROOT / ".bootstrap" / "bin" / "uv")


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "x")
    return path


def test_wheel_without_kernels_is_refused(tmp_path: Path) -> None:
    """Setuptools treats the kernels as optional, so that a failed compiler still produces a wheel."""
    wheels.check(archive(tmp_path / "whole.whl", wheels.KERNELS, "deltashard/__init__.py"))
    with pytest.raises(wheels.WheelError, match="did not compile"):
        wheels.check(archive(tmp_path / "bare.whl", "deltashard/__init__.py"))
    with pytest.raises(wheels.WheelError, match="holds tests"):
        wheels.check(archive(tmp_path / "more.whl", wheels.KERNELS, "tests/conftest.py"))


def test_one_wheel_serves_every_python(tmp_path: Path) -> None:
    """The wheel's tag is the oldest Python's stable ABI. ctypes loads the kernels without the Python ABI."""
    built = wheel()
    assert "-cp311-abi3-linux_" in built.name
    wheels.check(built)
    with zipfile.ZipFile(built) as file:
        file.extractall(tmp_path / "installed")
    program = "from deltashard_checkpoint.codecs import native_kernel as n; print(n.__file__, n._isa(0))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "DELTASHARD_KERNELS": "native"},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(str(tmp_path / "installed"))


def test_bills_of_materials_are_what_the_images_install(tmp_path: Path) -> None:
    """The CycloneDX documents list exactly the packages and versions of the images' pinned lists."""
    for words in ([], ["--sbom"]):
        subprocess.run(
            [str(ROOT / "images" / "requirements"), *words, str(tmp_path)],
            check=True,
            env=os.environ | {"UV": UV},
        )
    for path in sorted(tmp_path.glob("*.json")):
        name = path.name.removeprefix("sbom-").removesuffix(".cdx.json")
        document = json.loads(path.read_text())
        assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
        assert document["metadata"]["component"]["name"] == "deltashard"
        pinned = set(PINNED.findall((tmp_path / f"requirements-{name}.txt").read_text()))
        assert {(each["name"], each["version"]) for each in document["components"]} == pinned
        assert all(each["purl"].startswith("pkg:pypi/") for each in document["components"])
    assert {path.name for path in tmp_path.glob("*.json")} >= {
        f"sbom-{name}.cdx.json" for name in ("sidecar", "operator", "example")
    }
