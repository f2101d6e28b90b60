"""Which ranks of this machine died. Each holds a lock that goes with its process, and who leaves in order says so."""

from __future__ import annotations

import contextlib
from pathlib import Path

from deltashard.attach.lock import is_free, trainer_lock, trainer_locks


class Peers:
    """The other ranks of one machine, by the files in the run's runtime directory."""

    def __init__(self, runtime: Path, local: int) -> None:
        self._runtime = runtime
        self._local = local
        self._seen: set[Path] = set()
        self._left.unlink(missing_ok=True)

    def meet(self) -> None:
        """All ranks are here: who holds a lock now is one of them."""
        mine = trainer_lock(self._runtime, self._local)
        self._seen = {path for path in trainer_locks(self._runtime) if path != mine and not _free(path)}

    @property
    def met(self) -> bool:
        """Whether there is any other rank on this machine."""
        return bool(self._seen)

    @property
    def dead(self) -> bool:
        """Whether one of them is gone that did not leave in order."""
        return any(not self._left_of(path).exists() and _free(path) for path in self._seen)

    def leave(self) -> None:
        """This rank leaves in order."""
        with contextlib.suppress(OSError):  # the runtime directory was wiped
            self._left.touch()

    @property
    def _left(self) -> Path:
        return self._left_of(trainer_lock(self._runtime, self._local))

    @staticmethod
    def _left_of(lock: Path) -> Path:
        return lock.with_suffix(".left")


def _free(path: Path) -> bool:
    try:
        return is_free(path)
    except OSError:
        return False  # nothing is known
