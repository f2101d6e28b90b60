"""Sidecars of Checkpointers in a test's own process, forked from a warm process: each starts a second faster.

The fork gets what the launcher passes to `posix_spawn` (arguments, environment, log). It is a child of the calling
process, as a spawned one is: the launcher waits for it, and reads its exit code.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sidecar_process import Zygote

PR_SET_CHILD_SUBREAPER = 36
SERVE = (sys.executable, "-m", "deltashard_sidecar.main")
_libc = ctypes.CDLL(None, use_errno=True)
_spawn = os.posix_spawn


def _set_subreaper(orphans: bool) -> None:
    """Set whether orphans among the descendants of this process become its children."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _forked(path: str, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> int:
    if tuple(argv[: len(SERVE)]) != SERVE:
        return _spawn(path, argv, env, **options)
    log = next(action[1] for action in options["file_actions"] if action[0] == os.POSIX_SPAWN_DUP2)
    zygote = Zygote.get()
    _set_subreaper(True)
    try:
        pid = zygote.request(
            argv=list(argv[len(SERVE) :]),
            env=dict(env),
            cwd=str(Path.cwd()),
            log=str(Path(f"/proc/self/fd/{log}").readlink()),
            constants={},
            orphan=True,
        )
    finally:
        _set_subreaper(False)
    assert pid
    return pid


@pytest.fixture(autouse=True)
def forked_sidecars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the sidecars of the tests in a folder whose conftest imports this fixture."""
    monkeypatch.setattr(os, "posix_spawn", _forked)
