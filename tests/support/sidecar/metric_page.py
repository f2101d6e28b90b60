"""What a sidecar process shows on its metrics port."""

from __future__ import annotations

import re

from tests.support.sidecar_process import SidecarProcess


def metric(process: SidecarProcess, name: str) -> float:
    """The value of one sample."""
    page = process.metrics_page()
    found = re.search(rf"^{re.escape(name)} ([0-9.e+-]+)$", page, re.MULTILINE)
    assert found, f"{name} not in\n{page}"
    return float(found[1])


def blocks(process: SidecarProcess, use: str) -> int:
    """Arena blocks of this use."""
    return int(metric(process, f'deltashard_arena_blocks{{use="{use}"}}'))
