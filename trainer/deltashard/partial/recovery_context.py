"""What partial recovery stands on in one process: terms, whose run it is, where parts are staged, the PLS so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from deltashard_checkpoint.vocabulary import LINEAGE_KEY, PLS_KEY, RECOVERIES_KEY

from deltashard.attach.rank import Rank
from deltashard.partial.rule import RecoveryTerms


class RecoveryContext:
    """Of one Checkpointer; the training thread writes, that of `HangWatchdog` reads."""

    def __init__(self, terms: RecoveryTerms | None, rank: Rank, *, run: str, home: Path | None) -> None:
        """`terms` None: recovery is full. `home`: where parts of this machine, or pod, are staged; None: nowhere."""
        self.terms = terms
        self.run = run
        self.rank = rank.number
        self.world_size = rank.world_size
        self.home = home or Path()
        self.attempt: int | None = None
        """The attempt that trains; None: none does yet."""
        self.layout = ""
        self.lineage = ""
        """Of the run: what its commits say of themselves under partial recovery."""
        self.pls = 0.0
        """Of the run, up to here."""
        self.recoveries = 0
        """How many were partial."""
        self.off = "" if terms is None else _why_off(rank, home)
        """Why recovery is full all the same."""
        self.place = "" if terms is None or self.off else _place(self.home)
        """Tells where parts are staged from every other such place: ranks of one place can read each other's."""

    @property
    def pls_target(self) -> float:
        return 0.0 if self.terms is None or self.off else self.terms.pls_target

    @property
    def ready(self) -> bool:
        return self.terms is not None and not self.off and self.attempt is not None

    def begin(self, attempt: int, layout: str, meeting: str) -> None:
        """An attempt trains from here on; `meeting` names the ranks' meeting, and nobody else's."""
        self.attempt, self.layout = attempt, layout
        self.lineage = self.lineage or meeting

    @property
    def metadata(self) -> dict[str, str]:
        said = {LINEAGE_KEY: self.lineage} if self.pls_target and self.lineage else {}
        if self.recoveries:
            said |= {PLS_KEY: f"{self.pls:.9g}", RECOVERIES_KEY: str(self.recoveries)}
        return said

    def resumed(self, metadata: Mapping[str, str]) -> None:
        """The checkpoint of this run that is resumed has `metadata`; of another run's, or none: nothing."""
        self.pls, self.recoveries = pls_said(metadata)
        self.lineage = metadata.get(LINEAGE_KEY, "")

    def added(self, pls: float, recoveries: int) -> None:
        self.pls, self.recoveries = pls, recoveries


def pls_said(metadata: Mapping[str, str]) -> tuple[float, int]:
    """(PLS, partial recoveries) that a commit says; of one that says nothing, or nonsense, (0, 0)."""
    try:
        return max(0.0, float(metadata.get(PLS_KEY, 0))), max(0, int(metadata.get(RECOVERIES_KEY, 0)))
    except ValueError:
        return 0.0, 0


def _why_off(rank: Rank, home: Path | None) -> str:
    if rank.alone:
        return "there is one process only: nobody survives it"
    if torch.cuda.is_available():
        return "there are CUDA devices: waiting behind a dead collective of theirs is not proven safe"
    if home is None:
        return (
            "this pod names no place where survivors' rows would outlive its containers: mount a volume of the pod, "
            "and name it in DELTASHARD_STAGED_DIR"
        )
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"nothing can be staged in {home}: {error.strerror}"
    return ""


def _place(home: Path) -> str:
    # Pods of one machine have volumes of their own at one path: the folder's inode tells them apart.
    try:
        machine, folder = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), home.stat()
    except OSError:
        return f"{home}"
    return f"{machine} {folder.st_dev}:{folder.st_ino} {home}"
