"""Why an annotated workload is not admitted: a code for machines and a sentence for whoever wrote the manifest.

Codes are few and never renamed: they are metric labels and the `reason` of the status the user's client shows.
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
    """The workload cannot be injected as it is written; `code` says of which kind the reason is."""

    def __init__(self, code: Code, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.code: Code = code

    @property
    def sentence(self) -> str:
        """What the user reads: where, what is wrong, what to do."""
        where = f"{self.where}: " if self.where else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{where}{self.what}{remedy} ({self.code})"
