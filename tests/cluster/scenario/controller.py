"""Third-party controllers in the cluster: their images on the nodes, and the wait until they accept objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.cluster.kubernetes.api import ApiError, Object
from tests.cluster.kubernetes.cluster import LocalCluster
from tests.cluster.kubernetes.image import Image, Layer, archive
from tests.cluster.kubernetes.process import wait_until


def controller_image(
    cluster: LocalCluster,
    scratch: Path,
    program: Path,
    name: str,
    *,
    folders: tuple[str, ...] = (),
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Import an image with the program as /manager, `folders` and `files` into every node without a pool."""
    layer = Layer()
    layer.folder("tmp", 0o1777)
    for folder in ("etc", *folders):
        layer.folder(folder)
    for path, data in (files or {}).items():
        layer.file(path, data, 0o644)
    layer.file("manager", program.read_bytes(), 0o755)
    image = Image(name=name, layers=(layer.bytes(),), entrypoint=("/manager",), env={})
    file = archive(scratch / f"{program.name}.tar", [image])
    for node in cluster.nodes.values():
        if not node.pool:
            node.ctr("images", "import", file)


def wait_created(cluster: LocalCluster, path: str, document: Object) -> None:
    """Create an object as soon as it is accepted: the controller makes its webhook's certificate after it starts."""

    def created() -> bool:
        try:
            cluster.api.create(path, document)
        except ApiError as error:
            if "failed calling webhook" not in str(error) and error.code != 404:
                raise
            return False
        return True

    wait_until(created, timeout_s=120, every_s=0.5, what=f"a {document['kind']} is accepted")
