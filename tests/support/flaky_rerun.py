"""Reruns failed tests of a parallel run once, alone: a test that then passes is listed as flaky, and the run passes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import pytest

MAX_RERUNS = 2
"""With more failures than this limit, no test runs again."""


class FlakyRerun:
    """A plugin of the process that controls a run of several workers."""

    def __init__(self) -> None:
        self._failed: dict[str, None] = {}
        self._rerun: dict[str, subprocess.CompletedProcess[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Rerun the failed tests after the workers end and before the summary: this is the innermost wrapper.

        Keep an exit status other than TESTS_FAILED: its cause is not a failed test.
        """
        yield
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(self._failed) <= MAX_RERUNS:
            return
        for nodeid in self._failed:
            self._rerun[nodeid] = subprocess.run(
                [sys.executable, "-m", "pytest", nodeid], cwd=session.config.rootpath,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
        if not any(done.returncode for done in self._rerun.values()):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid, done in self._rerun.items():
            outcome = "failed again" if done.returncode else "passed"
            terminalreporter.section(f"ALONE ({outcome}) {nodeid}", red=True)
            terminalreporter.write_line(done.stdout)
        for nodeid, done in self._rerun.items():
            if not done.returncode:
                terminalreporter.write_line(
                    f"*** flaky: {nodeid} failed in the parallel run and passed alone. Fix it next ***",
                    red=True,
                    bold=True,
                )
