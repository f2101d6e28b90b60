"""What partial recovery stands on in one process: terms, whose run it is, where parts are staged, the PLS so far."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from deltashard.attach.rank import Rank
from deltashard.partial.rule import Terms

PLS_KEY = "deltashard/pls"
"""Name in a commit's metadata: the run's PLS, and how many recoveries were partial, as JSON `[0.01, 2]`."""


class Ground:
    """Of one Checkpointer; the training thread writes, the sentinel's reads."""

    def __init__(self, terms: Terms | None, rank: Rank, *, run: str, home: Path | None) -> None:
        """`terms` None: recovery is full. `home`: where this machine's staged parts lie; None: nowhere."""
        self.terms = terms
        self.run = run
        self.rank = rank.number
        self.world_size = rank.world_size
        self.home = home or Path()
        self.attempt: int | None = None
        """The attempt that trains; None: none does yet."""
        self.layout = ""
        self.pls = 0.0
        """Of the run, up to here."""
        self.recoveries = 0
        """How many were partial."""
        self.off = "" if terms is None else _why_off(rank, home)
        """Why recovery is full all the same."""

    @property
    def ready(self) -> bool:
        """Whether something would be staged."""
        return self.terms is not None and not self.off and self.attempt is not None

    def begin(self, attempt: int, layout: str) -> None:
        """An attempt trains from here on."""
        self.attempt, self.layout = attempt, layout

    @property
    def metadata(self) -> dict[str, str]:
        """What every commit says of the run."""
        return {PLS_KEY: json.dumps([self.pls, self.recoveries])} if self.recoveries else {}

    def resumed(self, metadata: Mapping[str, str]) -> None:
        """The checkpoint that is resumed has `metadata`."""
        self.pls, self.recoveries = pls_said(metadata)

    def added(self, pls: float, recoveries: int) -> None:
        """A partial recovery: the run's PLS is `pls` now, after so many."""
        self.pls, self.recoveries = pls, recoveries


def pls_said(metadata: Mapping[str, str]) -> tuple[float, int]:
    """(PLS, partial recoveries) that a commit says; of one that says nothing, or nonsense, (0, 0)."""
    try:
        pls, recoveries = json.loads(metadata.get(PLS_KEY, "[0, 0]"))
        return max(0.0, float(pls)), max(0, int(recoveries))
    except (ValueError, TypeError):
        return 0.0, 0


def _why_off(rank: Rank, home: Path | None) -> str:
    if rank.alone:
        return "there is one process only: nobody survives it"
    if torch.cuda.is_available():
        return "there are CUDA devices: waiting behind a dead collective of theirs is not proven safe"
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local) != rank.world_size:
        return "the ranks run on several machines"
    if home is None:
        return "the sidecar is a pod's: survivors' rows would not outlive its containers"
    return ""
