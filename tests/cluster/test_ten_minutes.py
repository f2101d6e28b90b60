"""docs/kubernetes/ten-minutes.md, command by command: from an empty cluster to a restored Job, and back to empty."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.scenario import page
from tests.cluster.scenario.stage import ClusterStage
from tests.cluster.scenario.system import NAMESPACE
from tests.support import published
from tests.support.tool import ROOT, require_tool

pytestmark = [pytest.mark.exclusive, pytest.mark.timeout(1200, func_only=True)]


@pytest.fixture
def empty_cluster(stage: ClusterStage, stage_lock: None, tmp_path: Path) -> Iterator[ClusterStage]:
    """Uninstall deltashard and import the published images into the nodes; later tests install deltashard again."""
    archive = published.build(tmp_path / "published.tar", require_tool("minio"))
    for node in stage.cluster.nodes.values():
        node.ctr("images", "import", archive)
    archive.unlink()
    try:
        _empty(stage)
        yield stage
    finally:
        _empty(stage)  # a failed page may leave objects


def _empty(stage: ClusterStage) -> None:
    stage.system.uninstall()
    stage.cluster.kubectl(
        "delete", "namespace", "recommender", NAMESPACE, "--ignore-not-found", timeout_s=240
    )


def test_every_page_command_works(empty_cluster: ClusterStage, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("helm", "kubectl"):
        (programs / name).symlink_to(require_tool(name))
    kubeconfig = tmp_path / "kubeconfig"
    shutil.copy(empty_cluster.cluster.kubeconfig, kubeconfig)
    steps = page.read((ROOT / "docs" / "kubernetes" / "ten-minutes.md").read_text())
    page.run(
        steps,
        folder=ROOT,
        environment={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "KUBECONFIG": str(kubeconfig),
        },
        timeout_s=600,
        done=lambda step, output, seconds: print(
            f"--- line {step.line}, {seconds:.1f} s\n{step.commands}\n{output}"
        ),
    )
