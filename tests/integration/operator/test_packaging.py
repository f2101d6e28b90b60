"""The folder `operator/` holds the package and shadows nothing."""

from __future__ import annotations

import operator
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.server.minio_server import ROOT


def test_the_folder_is_no_package() -> None:
    """An `__init__.py` in it would take the standard library's name."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert Path(operator.__file__).parent == Path(sysconfig.get_path("stdlib"))


def test_the_standard_library_wins_from_the_repository_root() -> None:
    """Also in a process whose first import path is the root, where the folder lies."""
    program = "import operator, deltashard_operator; print(operator.itemgetter, operator.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "operator.itemgetter" in done.stdout
    assert str(ROOT) not in done.stdout
