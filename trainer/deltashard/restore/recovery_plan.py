"""The seam of recovery: what an extra may do beside bringing all ranks back to one checkpoint.

Core imports no extra. One that has a plan puts a factory into `FACTORIES`; each Checkpointer takes the first plan that
it is offered. Without any, recovery is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from deltashard_checkpoint.format.frame import FrameBytes
from deltashard_checkpoint.format.typed_tree import EncodedTree
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import RunMember
from deltashard.attach.launcher import Launcher
from deltashard.attach.term_signal import TermHandler
from deltashard.config import CheckpointConfig
from deltashard.errors import UserError
from deltashard.program import TrainingLoop
from deltashard.restore.collective import CollectiveRestore
from deltashard.tracking.snapshot_base import SnapshotBase


class PartialRestore(Protocol):
    """What one rank takes from elsewhere than the checkpoint, in a restore that is not exact."""

    notes: list[str]

    @property
    def step(self) -> int:
        """Training continues after this one."""

    @property
    def rank_steps(self) -> tuple[int, ...]:
        """By rank: the step that its rows are of."""

    def overlay(self, raw: Mapping[str, memoryview]) -> dict[str, memoryview]:
        """The checkpoint's blobs `raw` with what is newer; raises `CheckpointRetired` where all ranks are to ask again."""

    def frames(self) -> Iterator[FrameBytes]:
        """Rows that are newer than the checkpoint's."""

    def on_applied(self) -> None:
        """The program is what was agreed to."""


class RecoveryPlan:
    """Full recovery; an extra overrides what it does otherwise. On the training thread, but for `dead`."""

    terms = "full"
    """What all ranks must have agreed to, in words."""
    pls_target = 0.0
    """Portion of lost samples (PLS) that the run may come to; 0: recovery is full."""

    @property
    def pls(self) -> float:
        """Of the run, up to here."""
        return 0.0

    @property
    def metadata(self) -> Mapping[str, str]:
        return {}

    @property
    def dead(self) -> bool:
        """Whether a rank is gone that did not leave in order."""
        return False

    def watch(
        self,
        base: SnapshotBase,
        blobs: Callable[[int], Iterable[tuple[str, EncodedTree]]],
        term: TermHandler | None,
    ) -> None:
        """All parts are there. `blobs` gives all that this rank has at a step beside rows, by plain names."""

    def load_metadata(self, metadata: Mapping[str, str]) -> None:
        """The checkpoint of this run that is resumed has `metadata`; of another run's, or none: nothing."""

    def agree(self, ranks: CollectiveRestore, reply: pb.OpenReply, *, unusual: str) -> PartialRestore | None:
        """What all ranks take beside the checkpoint of `reply`; None: nothing.

        `unusual`: what makes it no plain restart; empty: nothing.
        """

    def training_started(self, reply: pb.OpenReply, group_name: str) -> None:
        """Training begins under an attempt; `group_name` names that of the ranks."""

    def handle_error(self, error: BaseException) -> bool:  # noqa: ARG002
        """`error` came out of the training loop; returns whether it says that a rank died."""
        return False

    def leave(self) -> None:
        """This rank leaves in order."""

    def close(self) -> None:
        """Release what `watch` took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """For whom a plan is made."""

    config: CheckpointConfig
    loop: TrainingLoop
    member: RunMember
    launcher: Launcher


FACTORIES: list[Callable[[PlanContext], RecoveryPlan | None]] = []


def create_plan(context: PlanContext) -> RecoveryPlan:
    """The plan of one Checkpointer; raises `UserError` when partial recovery is wanted, and nothing offers it."""
    for factory in FACTORIES:
        if (plan := factory(context)) is not None:
            return plan
    if context.config.partial:
        raise UserError(
            'recovery="partial" is not installed', where="Checkpointer()", remedy="leave recovery= out"
        )
    return RecoveryPlan()
