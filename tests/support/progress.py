"""Progress output of the tests: which file runs now, and a failure's reason when it happens, not at the end."""

from __future__ import annotations

import time

import pytest

LINES = 60
"""Lines of a failure that are printed at once; the final report has the whole text."""


class ProgressReporter:
    """A plugin of the process that controls the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began_s = time.monotonic()
        self._files: set[str] = set()
        self._done = 0

    @property
    def _terminal(self) -> pytest.TerminalReporter | None:
        found: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        return found

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        terminal = self._terminal
        if file in self._files or terminal is None or self._config.option.verbose > 0:
            return
        self._files.add(file)
        terminal.ensure_newline()
        terminal.write_line(f"{time.monotonic() - self._began_s:5.0f} s, {self._done:5d} done  {file}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._done += report.when == "call"
        terminal = self._terminal
        if not report.failed or terminal is None:
            return
        terminal.ensure_newline()
        terminal.write_line(f"FAILED ({report.when}) {report.nodeid}", red=True, bold=True)
        for line in report.longreprtext.splitlines()[-LINES:]:
            terminal.write_line(f"    {line}")
