"""What a profile is remembered under."""

from __future__ import annotations

import os
from pathlib import Path

from deltashard_sidecar.deciding.place import MAX_KEY, key_of, place


def test_a_place_is_what_was_said_and_the_processors(tmp_path: Path) -> None:
    """Nodes of another type are other places, whoever says nothing."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t: fpu\nmodel name\t: AMD EPYC 7B13\n"
    )
    count = os.cpu_count()
    assert place("trainer:v3, cpu 4", cpuinfo=cpuinfo) == f"trainer:v3, cpu 4, {count} x AMD EPYC 7B13"
    assert place("", cpuinfo=cpuinfo) == f"{count} x AMD EPYC 7B13"
    assert place("", cpuinfo=tmp_path / "none") == f"{count} x processors"


def test_a_long_place_hides_no_other_world_size() -> None:
    """What is cut off is the place's end."""
    long = "registry.example/" + "x" * 400
    assert key_of(long, 4) != key_of(long, 8)
    assert len(key_of(long, 4)) == MAX_KEY
