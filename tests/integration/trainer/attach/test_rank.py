"""The rank of a second process."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltashard.attach.lock import AnotherTrainer, hold_file, release_file


def test_the_second_process_is_not_told_to_take_another_name(tmp_path: Path) -> None:
    """A run for each rank was what the message invited to: N trainings that know nothing of each other."""
    import subprocess
    import sys

    path = tmp_path / "lock"
    held = (
        "import sys, pathlib; from deltashard.attach.lock import hold_file; hold_file(pathlib.Path(sys.argv[1])); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", held, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        try:
            with pytest.raises(AnotherTrainer) as caught:
                hold_file(path, deadline_s=0.0, living_s=0.0)
        finally:
            other.communicate("")
    assert "init_process_group()" in caught.value.remedy
    hold_file(path)
    release_file(path)
