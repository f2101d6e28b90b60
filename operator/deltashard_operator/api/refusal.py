"""Rejection of an annotated workload: a code for programs and a message for the author of the manifest.

Codes are few and stable: they are metric labels and the `reason` of the status that clients show.
"""

from __future__ import annotations

from typing import Literal, get_args

from deltashard_checkpoint.errors import UserError

Code = Literal[
    "BadAnnotation",
    "BadPolicy",
    "BadTemplate",
    "ContainerNameTaken",
    "CopiedManifest",
    "MarkerWithoutSidecar",
    "MountTaken",
    "NamespaceNotWatched",
    "PodResourcesTooSmall",
    "PolicyNotFound",
    "PolicyUnavailable",
    "RunIdTaken",
    "StoreMoved",
    "VariableTaken",
    "VolumeUnsupported",
    "Unsupported",
]
CODES: tuple[Code, ...] = get_args(Code)


class Refusal(UserError):
    """The workload cannot be injected as written. `code` classifies the reason."""

    def __init__(self, code: Code, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.code: Code = code

    @property
    def sentence(self) -> str:
        """Message for the user: where, what is wrong, what to do."""
        where = f"{self.where}: " if self.where else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{where}{self.what}{remedy} ({self.code})"
