"""What a sidecar process shows on its metrics port."""

from __future__ import annotations

import re
import urllib.request

from tests.support.sidecar_process import SidecarProcess


def metric(process: SidecarProcess, name: str) -> float:
    """The value of one sample."""
    url = f"http://127.0.0.1:{process.ready()['metrics_port']}/metrics"
    page = urllib.request.urlopen(url, timeout=60).read().decode()
    found = re.search(rf"^{re.escape(name)} ([0-9.e+-]+)$", page, re.MULTILINE)
    assert found, f"{name} not in\n{page}"
    return float(found[1])


def blocks(process: SidecarProcess, use: str) -> int:
    """Arena blocks of this use."""
    return int(metric(process, f'deltashard_arena_blocks{{use="{use}"}}'))
