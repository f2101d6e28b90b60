"""State of partial recovery in one process: terms, run, staging directory, and PLS so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from deltashard_checkpoint.vocabulary import LINEAGE_KEY, PLS_KEY, RECOVERIES_KEY

from deltashard.attach.rank import Rank
from deltashard.partial.rule import RecoveryTerms


class RecoveryContext:
    """Context of one Checkpointer; the training thread writes, the thread of `HangWatchdog` reads."""

    def __init__(
        self, terms: RecoveryTerms | None, rank: Rank, *, run: str, staging_dir: Path | None
    ) -> None:
        """`terms` None: recovery is full. `staging_dir`: where ranks of this machine or pod stage; None: nowhere."""
        self.terms = terms
        self.run = run
        self.rank = rank.number
        self.world_size = rank.world_size
        self.staging_dir = staging_dir or Path()
        self.attempt: int | None = None
        self.layout = ""
        self.lineage = ""
        """Lineage of the run, recorded in its commits under partial recovery."""
        self.pls = 0.0
        self.recoveries = 0
        self.disabled_reason = "" if terms is None else _disabled_reason(rank, staging_dir)
        """Why recovery is full although partial recovery is configured."""
        self.location = "" if terms is None or self.disabled_reason else _location_of(self.staging_dir)
        """Identifies the staging directory: ranks with equal locations can read each other's parts."""

    @property
    def pls_target(self) -> float:
        return 0.0 if self.terms is None or self.disabled_reason else self.terms.pls_target

    @property
    def ready(self) -> bool:
        return self.terms is not None and not self.disabled_reason and self.attempt is not None

    def begin(self, attempt: int, layout: str, group_name: str) -> None:
        """Record that `attempt` trains from now on; `group_name` is unique to this rendezvous of the ranks."""
        self.attempt, self.layout = attempt, layout
        self.lineage = self.lineage or group_name

    @property
    def metadata(self) -> dict[str, str]:
        found = {LINEAGE_KEY: self.lineage} if self.pls_target and self.lineage else {}
        if self.recoveries:
            found |= {PLS_KEY: f"{self.pls:.9g}", RECOVERIES_KEY: str(self.recoveries)}
        return found

    def load_metadata(self, metadata: Mapping[str, str]) -> None:
        """Load `metadata` of the resumed checkpoint; empty if it is another run's or there is none."""
        self.pls, self.recoveries = pls_from_metadata(metadata)
        self.lineage = metadata.get(LINEAGE_KEY, "")

    def record_recovery(self, pls: float, recoveries: int) -> None:
        self.pls, self.recoveries = pls, recoveries


def pls_from_metadata(metadata: Mapping[str, str]) -> tuple[float, int]:
    """Return (PLS, partial recoveries) of a commit's metadata; (0, 0) if missing or invalid."""
    try:
        return max(0.0, float(metadata.get(PLS_KEY, 0))), max(0, int(metadata.get(RECOVERIES_KEY, 0)))
    except ValueError:
        return 0.0, 0


def _disabled_reason(rank: Rank, staging_dir: Path | None) -> str:
    if rank.alone:
        return "there is only one process, so no rank survives its loss"
    if torch.cuda.is_available():
        return "there are CUDA devices: waiting behind a dead CUDA collective is not proven safe"
    if staging_dir is None:
        return (
            "this pod has no directory where survivors' rows outlive its containers: mount a volume of the pod, "
            "and name it in DELTASHARD_STAGED_DIR"
        )
    try:
        staging_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"nothing can be staged in {staging_dir}: {error.strerror}"
    return ""


def _location_of(staging_dir: Path) -> str:
    # Pods of one machine mount separate volumes at the same path; the inode distinguishes them.
    try:
        machine, folder = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), staging_dir.stat()
    except OSError:
        return f"{staging_dir}"
    return f"{machine} {folder.st_dev}:{folder.st_ino} {staging_dir}"
