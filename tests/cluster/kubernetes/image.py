"""Container images without a Docker engine or a registry: OCI archives written here, imported into each node's containerd.

An image contains what a user would install: the wheel built from this tree, installed into /opt/deltashard, plus, for
the trainer, its script. Large third-party parts come from the host, read-only, into every container by the runtime's
base spec: /usr (libc, shell), the Python that runs the tests at /opt/python, and the site-packages that hold torch,
numpy and grpc at /opt/third-party. That folder is on PYTHONPATH, where `.pth` files are not read: the checkout's
editable install is invisible in a container, so only the wheel can be imported.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kubernetes.process import ClusterError, run
from tests.support.machine import limit_s

ROOT = Path(__file__).parents[3]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltashard"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
MOUNTS = {
    "/usr": Path("/usr"),
    "/opt/python": Path(sys.base_prefix),
    "/opt/third-party": Path(sysconfig.get_paths()["purelib"]),
}
"""Folder in every container: folder of the host, read-only."""
MOUNTS |= {
    f"/{name}": Path("/", name)
    for name in ("bin", "sbin", "lib", "lib64")
    if Path("/", name).is_dir() and not Path("/", name).is_symlink()  # a system whose /usr is not merged
}
PAUSE = "localhost/pause:1"
TAG = "test"
OLD_TAG, OLD_VERSION = "old", "0.0.9"
"""Images of the same tree under an older version."""
SIDECAR, OPERATOR, TRAINER = (f"localhost/deltashard-{name}" for name in ("sidecar", "operator", "trainer"))
"""Repositories."""
ENVIRONMENT = {
    "PATH": "/opt/deltashard/bin:/opt/python/bin:/usr/bin:/bin",
    "PYTHONPATH": "/opt/deltashard:/opt/third-party",
    "LD_LIBRARY_PATH": "/opt/python/lib",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "HOME": "/tmp",
}
_PACKAGED = ("checkpoint", "trainer", "sidecar", "operator", "proto", "cli")


def _uv() -> str:
    for candidate in (os.environ.get("UV"), ROOT / ".bootstrap/bin/uv", shutil.which("uv")):
        if candidate and Path(candidate).exists():
            return str(candidate)
    raise ClusterError("uv is needed to build the wheel: `make venv` puts it into .bootstrap, or set UV=")


def wheel(version: str = "") -> Path:
    """Build the wheel of this tree once per content, from a copy so that no stale build folder gets into it.

    With `version`, the same code reports that version.
    """
    files = [ROOT / name for name in ("pyproject.toml", "setup.py", "README.md")]
    for package in _PACKAGED:
        files += [
            path
            for path in sorted((ROOT / package).rglob("*"))
            if path.suffix in {".py", ".c", ".typed", ".pyi", ".yaml"} and "__pycache__" not in path.parts
        ]
    digest = hashlib.sha256(f"{sys.version} {version}".encode())
    for path in files:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    folder = CACHE / "wheels" / digest.hexdigest()[:16]
    found = list(folder.glob("*.whl"))
    if not found:
        with tempfile.TemporaryDirectory(prefix="deltashard-wheel-") as scratch:
            source, built = Path(scratch, "source"), Path(scratch, "built")
            for path in files:
                copy = source / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
            if version:
                project = source / "pyproject.toml"
                text, count = re.subn(r'(?m)^version = ".*"$', f'version = "{version}"', project.read_text())
                if count != 1:
                    raise ClusterError(f"{project.name} has {count} lines that set a version")
                project.write_text(text)
            command = [_uv(), "build", "-q", "--wheel", "--python", sys.executable, "--out-dir", built]
            run(*command, source, timeout_s=600)
            folder.mkdir(parents=True, exist_ok=True)
            for path in built.glob("*.whl"):
                shutil.move(path, folder / path.name)
        found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise ClusterError(f"expected one wheel in {folder}, found {found}")
    return found[0]


def installed(target: Path, version: str = "") -> Path:
    """Install the wheel into a folder; its scripts run with the container's Python."""
    run(
        _uv(), "pip", "install", "-q", "--no-deps", "--compile-bytecode", "--python", sys.executable,
        "--target", target, wheel(version),
    )  # fmt: skip
    for script in (target / "bin").iterdir():
        text = script.read_text()
        if text.startswith("#!"):
            script.write_text(f"#!/opt/python/bin/{PYTHON}\n" + text.partition("\n")[2])
    return target


class Layer:
    """A tar archive under construction; equal content gives equal bytes."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._data, mode="w")  # noqa: SIM115 - closed by `bytes`

    def folder(self, name: str, mode: int = 0o755) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        self._tar.addfile(entry)

    def link(self, name: str, target: str) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(entry)

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(data), mode
        self._tar.addfile(entry, io.BytesIO(data))

    def tree(self, name: str, folder: Path) -> None:
        """Add a folder with all its content, readable by every user."""
        self.folder(name)
        for path in sorted(folder.rglob("*")):
            where = f"{name}/{path.relative_to(folder)}"
            if path.is_dir():
                self.folder(where)
            else:
                self.file(where, path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)

    def bytes(self) -> bytes:
        self._tar.close()
        return self._data.getvalue()


def base_layer() -> bytes:
    """Build an empty system that finds every file in the mounts."""
    layer = Layer()
    for name in ("etc", "proc", "sys", "dev", "run", "var", "var/cache", "opt", "app", "root", "home"):
        layer.folder(name)
    for mount in MOUNTS:
        layer.folder(mount.lstrip("/"))
    layer.folder("tmp", 0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            layer.link(name, f"usr/{name}")
    layer.file("etc/passwd", b"root:x:0:0::/root:/bin/sh\nnonroot:x:65532:65532::/tmp:/bin/sh\n")
    layer.file("etc/group", b"root:x:0:\nnonroot:x:65532:\n")
    layer.file("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    layer.file("etc/ld.so.cache", Path("/etc/ld.so.cache").read_bytes())
    return layer.bytes()


def pause_layer() -> bytes:
    """Build the image of a pod's pause process: the host's `sleep` with its libraries, since sandboxes get no mounts."""
    program = Path(shutil.which("sleep") or "/bin/sleep").resolve()
    layer = Layer()
    layer.file("pause", program.read_bytes(), 0o755)
    for library in sorted(set(re.findall(r"/\S+", run("ldd", program)))):
        layer.file(library.lstrip("/"), Path(library).read_bytes(), 0o755)
    return layer.bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image: its layers from the bottom up."""

    name: str
    layers: tuple[bytes, ...]
    entrypoint: tuple[str, ...]
    env: Mapping[str, str]


def archive(path: Path, images: Sequence[Image]) -> Path:
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, media: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {
            "mediaType": f"application/vnd.oci.image.{media}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    entries = []
    for image in images:
        layers = [blob(layer, "layer.v1.tar") for layer in image.layers]
        config = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(
                os.uname().machine, os.uname().machine
            ),
            "os": "linux",
            "config": {
                "Env": [f"{key}={value}" for key, value in image.env.items()],
                "Entrypoint": list(image.entrypoint),
                "User": "65532",
            },
            "rootfs": {"type": "layers", "diff_ids": [each["digest"] for each in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": layers,
        }
        entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
        entry["annotations"] = {
            "io.containerd.image.name": image.name,
            "org.opencontainers.image.ref.name": image.name.rpartition(":")[2],
        }
        entries.append(entry)
    layer = Layer()
    layer.file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    layer.file("index.json", json.dumps({"schemaVersion": 2, "manifests": entries}).encode())
    layer.folder("blobs")
    layer.folder("blobs/sha256")
    for digest, data in blobs.items():
        layer.file(f"blobs/sha256/{digest}", data)
    path.write_bytes(layer.bytes())
    return path


def build(path: Path, *, tag: str = TAG, version: str = "") -> Path:
    """Build an archive of the sidecar's, the operator's and the trainer's images, and optionally the sandboxes' image."""
    with tempfile.TemporaryDirectory(prefix="deltashard-image-") as scratch:
        layer = Layer()
        layer.tree("opt/deltashard", installed(Path(scratch, "wheel"), version))
        system = (base_layer(), layer.bytes())
    script = Layer()
    script.tree("app", Path(__file__).parents[1] / "trainers")
    python = (f"/opt/python/bin/{PYTHON}",)
    return archive(
        path,
        [
            Image(name=PAUSE, layers=(pause_layer(),), entrypoint=("/pause", "infinity"), env={}),
            Image(
                name=f"{SIDECAR}:{tag}", layers=system, entrypoint=("deltashard-sidecar",), env=ENVIRONMENT
            ),
            Image(name=f"{OPERATOR}:{tag}", layers=system, entrypoint=python, env=ENVIRONMENT),
            Image(
                name=f"{TRAINER}:{tag}", layers=(*system, script.bytes()), entrypoint=python, env=ENVIRONMENT
            ),
        ],
    )


def base_spec() -> dict[str, object]:
    """Return the runtime spec of every container: containerd's own, with the mounts and a bounded number of files."""
    printed = subprocess.run(
        ["ctr", "oci", "spec"], check=True, capture_output=True, text=True, timeout=limit_s(60)
    ).stdout
    spec: dict[str, object] = json.loads(printed)
    mounts = spec["mounts"]
    assert isinstance(mounts, list)
    for inside, outside in MOUNTS.items():
        mounts.append(
            {
                "destination": inside,
                "type": "bind",
                "source": str(outside),
                "options": ["rbind", "ro", "nosuid"],
            }
        )
    process = spec["process"]
    assert isinstance(process, dict)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # raising it would need CAP_SYS_RESOURCE
    process["rlimits"] = [{"type": "RLIMIT_NOFILE", "hard": files, "soft": files}]
    return spec
