"""Extension point of recovery: what an extra can do instead of a full restore of all ranks from one checkpoint.

The core imports no extra. An extra with a plan adds a factory to `FACTORIES`; each Checkpointer uses the first plan
that a factory offers. Without any, recovery is full.
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
    """Data that one rank takes from other sources than the checkpoint, in a restore that is not exact."""

    notes: list[str]

    @property
    def step(self) -> int:
        """The step after which training continues."""

    @property
    def rank_steps(self) -> tuple[int, ...]:
        """By rank: the step of its rows."""

    def overlay(self, raw: Mapping[str, memoryview]) -> dict[str, memoryview]:
        """Return the checkpoint's blobs `raw` with newer ones; raises `CheckpointRetired` if all ranks must reopen."""

    def frames(self) -> Iterator[FrameBytes]:
        """Frames of rows that are newer than the checkpoint's."""

    def on_applied(self) -> None:
        """Called when the agreed state has been applied to the program."""


class RecoveryPlan:
    """Full recovery, as the base class of other plans. On the training thread, except for `dead`."""

    terms = "full"
    """Description of the plan; must be equal on all ranks."""
    pls_target = 0.0
    """Limit of the run's portion of lost samples (PLS); 0: recovery is full."""

    @property
    def pls(self) -> float:
        """The run's portion of lost samples so far."""
        return 0.0

    @property
    def metadata(self) -> Mapping[str, str]:
        return {}

    @property
    def dead(self) -> bool:
        """Whether a rank ended without `leave`."""
        return False

    def watch(
        self,
        base: SnapshotBase,
        blobs: Callable[[int], Iterable[tuple[str, EncodedTree]]],
        term: TermHandler | None,
    ) -> None:
        """Start, once all parts are created. `blobs` yields this rank's non-row state at a step, by plain names."""

    def load_metadata(self, metadata: Mapping[str, str]) -> None:
        """Called with the metadata of the resumed checkpoint; empty if there is none or it is another run's."""

    def agree(self, ranks: CollectiveRestore, reply: pb.OpenReply, *, unusual: str) -> PartialRestore | None:
        """What all ranks take from other sources than the checkpoint of `reply`; None: nothing.

        `unusual`: why this is not a plain restart; empty if it is.
        """

    def training_started(self, reply: pb.OpenReply, group_name: str) -> None:
        """Training begins under an attempt; `group_name` identifies the group of ranks."""

    def handle_error(self, error: BaseException) -> bool:  # noqa: ARG002
        """The training loop raised `error`; returns whether the error means that a rank died."""
        return False

    def leave(self) -> None:
        """This rank leaves in an orderly way."""

    def close(self) -> None:
        """Release what `watch` took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """The Checkpointer that a plan is created for."""

    config: CheckpointConfig
    loop: TrainingLoop
    member: RunMember
    launcher: Launcher


FACTORIES: list[Callable[[PlanContext], RecoveryPlan | None]] = []


def create_plan(context: PlanContext) -> RecoveryPlan:
    """Return the plan of one Checkpointer; raises `UserError` when no factory offers the requested partial recovery."""
    for factory in FACTORIES:
        if (plan := factory(context)) is not None:
            return plan
    if context.config.partial:
        raise UserError(
            'recovery="partial" is not installed', where="Checkpointer()", remedy="leave recovery= out"
        )
    return RecoveryPlan()
