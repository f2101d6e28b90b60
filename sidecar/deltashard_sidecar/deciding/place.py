"""Where a profile was measured: image and limits, as whoever started this sidecar says, and the node, as it is seen."""

from __future__ import annotations

import os
import re
from pathlib import Path

from deltashard_sidecar.settings import version

CPUINFO = Path("/proc/cpuinfo")
MAX_KEY = 200
"""Characters: it rides in every commit."""
_MODEL = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)


def place(said: str, *, cpuinfo: Path = CPUINFO) -> str:
    """`said` (the setting `profile_key`) and the node's processors."""
    try:
        found = _MODEL.search(cpuinfo.read_text())
    except OSError:
        found = None
    model = "processors" if found is None else found[1].strip()
    return ", ".join(each for each in (said, f"{os.cpu_count()} x {model}") if each)


def key_of(where: str, world_size: int) -> str:
    """The name of a profile: one that was measured under another name is not gone on from."""
    # What is cut off, if it has to be, is the place's end.
    return f"world size {world_size}, {version()}, {where}"[:MAX_KEY]
