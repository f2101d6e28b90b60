"""A failed test is rerun alone: the result of the run when it then passes or fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("each", range({tests}))
def test_flaky(each):
    runs = Path("runs-" + str(each))
    first = not runs.exists()
    runs.touch()
    assert not (first or {always})

def test_sound():
    pass
"""

CONFTEST = """
from tests.support.flaky_rerun import FlakyRerun
import pytest

def pytest_configure(config):
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(FlakyRerun())
"""


@pytest.mark.parametrize(
    ("tests", "always", "passes", "alone"),
    [(2, False, True, 2), (1, True, False, 0), (3, False, False, 0)],
    ids=["pass alone", "one fails twice", "three do not run again"],
)
def test_failed_test_is_rerun_alone(
    tests: int, always: bool, passes: bool, alone: int, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.pytest.ini_options]\npythonpath = ["{Path(__file__).parents[3]}"]\n'
    )
    (tmp_path / "test_flaky.py").write_text(FLAKY.format(tests=tests, always=always))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--numprocesses", "1"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == passes, done.stdout
    assert f"{tests} failed, 1 passed" in done.stdout
    assert done.stdout.count("*** flaky: test_flaky.py::test_flaky[") == alone
    assert ("ALONE (failed again) test_flaky.py::test_flaky[0]" in done.stdout) == always
