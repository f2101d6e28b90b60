"""The process that runs many user programs."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from tests.programs.dimension import Spec, differences
from tests.support.tool import ROOT


class ProgramRunner:
    """Sends programs to a `zygote` process; see `zygote.evaluate`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.programs.zygote"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def verdict(self, spec: Spec) -> dict[str, Any]:
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(differences(spec)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(120)
