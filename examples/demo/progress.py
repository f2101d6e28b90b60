"""Shows the training's progress: a line rewritten in place in a terminal, elsewhere periodic new lines."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from records import StepLines
from rich.console import Console

POLL_S = 0.5
LINE_INTERVAL_S = 5.0


class ProgressLine:
    """Follows the step lines of a folder inside its block."""

    def __init__(self, console: Console, folder: Path, steps: int) -> None:
        self._console = console
        self._lines = StepLines(folder)
        self._steps = steps
        self._status = console.status("    starting ...") if console.is_terminal else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._status is not None:
            self._status.stop()

    def _follow(self) -> None:
        began_s = printed_s = time.monotonic()
        while not self._over.wait(POLL_S):
            text = f"    step {self._lines.last:,} of {self._steps:,}, {time.monotonic() - began_s:.0f} s"
            if self._status is not None:
                self._status.update(text)
            elif time.monotonic() - printed_s >= LINE_INTERVAL_S:
                printed_s = time.monotonic()
                self._console.print(text, style="dim")
