"""The published images: those of images/Dockerfile, under the names that the examples, the chart and the pages use.

So the commands of a page run here as they are written. Where an engine would install packages from an index, these
images find them in the host's mounts (see `images`). Paths and entry points are the same, and a test compares them
with the Dockerfile.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.kubernetes.image import (
    ENVIRONMENT,
    PYTHON,
    ROOT,
    Image,
    Layer,
    archive,
    base_layer,
    installed,
)

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MINIO = "quay.io/minio/minio:RELEASE.2025-09-07T16-13-09Z"
"""The release that `tools/build minio` builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One image of the project."""

    target: str
    """Stage of images/Dockerfile."""
    repository: str
    entrypoint: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """File or folder in the image: its path in the repository, in addition to the environment in /opt/deltashard."""

    @property
    def name(self) -> str:
        return f"{self.repository}:{VERSION}"


PUBLISHED = (
    Published(
        target="sidecar",
        repository="ghcr.io/deltashard/deltashard-sidecar",
        entrypoint=("deltashard-sidecar",),
    ),
    Published(target="operator", repository="ghcr.io/deltashard/deltashard-operator"),
    Published(
        target="example",
        repository="ghcr.io/deltashard/deltashard-example",
        entrypoint=("python", "/app/example/train.py"),
        files={
            "/app/data": "examples/data",
            "/app/example/baskets.py": "examples/demo/baskets.py",
            "/app/example/model.py": "examples/demo/model.py",
            "/app/example/train.py": "examples/kubernetes/train.py",
            "/app/example/group.py": "examples/ddp/train.py",
        },
    ),
)


def _files(published: Published) -> bytes:
    layer = Layer()
    for inside, outside in published.files.items():
        if (ROOT / outside).is_dir():
            layer.tree(inside.lstrip("/"), ROOT / outside)
        else:
            layer.file(inside.lstrip("/"), (ROOT / outside).read_bytes())
    return layer.bytes()


def build(path: Path, minio: Path) -> Path:
    """Build an archive of all published images and of an image of MinIO, whose program is `minio`."""
    with tempfile.TemporaryDirectory(prefix="deltashard-image-") as scratch:
        layer = Layer()
        layer.tree("opt/deltashard", installed(Path(scratch, "wheel")))
        layer.link("opt/deltashard/bin/python", f"/opt/python/bin/{PYTHON}")
        system = (base_layer(), layer.bytes())
    server = Layer()
    server.file("opt/minio/minio", minio.read_bytes(), 0o755)  # /usr is the host's
    images = [
        Image(
            name=each.name,
            layers=(*system, _files(each)) if each.files else system,
            entrypoint=each.entrypoint,
            env=ENVIRONMENT,
        )
        for each in PUBLISHED
    ]
    images.append(
        Image(
            name=MINIO,
            layers=(system[0], server.bytes()),
            entrypoint=("minio",),
            env={"PATH": "/opt/minio:/usr/bin:/bin"},
        )
    )
    return archive(path, images)
