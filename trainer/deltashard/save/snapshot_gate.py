"""Reasons that block a snapshot, shared by `step()`, `save()`, `wait()`, SIGTERM and `close()`.

A snapshot is only taken at the end of a whole step and while a sidecar is attached. A blocked request stays pending.
Which reasons apply depends on the asker:

                 timer   save()  urgent  wait()  SIGTERM close()
    torn           x       x       x       x       x       x    an exception interrupted an optimizer's step
    stepped        x       x       x       x       x       x    an optimizer stepped after the last step()
    accumulating   x       x       x       x       x       -    the last step() ended no optimizer step
    moved          x       x       x       x       x       -    a batch was taken, or a forward ran, after that
    in flight      x       x       x       x       x       x    a save is being copied, or not durable yet
    disconnected   x       x       x       x       x       x
    unopened       x       x       x       x       x       x    the store was full when the attempt was to be opened
    backing off    x       x       x       -       -       -    a save failed a moment ago

`close()` cannot wait for another step: it takes the snapshot and warns about what is inexact. Askers that hold training
anyway ignore the back-off. The watchdog (`watchdog`) adds the reasons of other ranks, of `validate()`, and of a sidecar
that requests nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deltashard_proto.block_reason import BlockReason


class Asker(Enum):
    """Requester of a snapshot."""

    TIMER = "timer"
    REQUEST = "request"
    """`save()`, or a request through the sidecar."""
    URGENT = "urgent"
    WAITER = "wait"
    """The training thread waits for the save."""
    TERM = "term"
    """SIGTERM was received, and its grace period runs."""
    CLOSE = "close"


MESSAGE = {
    BlockReason.TORN: "an exception interrupted an optimizer's step(): the model is inconsistent until one completes",
    BlockReason.STEPPED: "an optimizer has stepped since the last step(): that boundary is gone",
    BlockReason.ACCUMULATING: "the last step() ended no step of an optimizer given to the Checkpointer",
    BlockReason.MOVED: "a batch was taken, or a forward pass ran, since the last step()",
    BlockReason.IN_FLIGHT: "the previous save was not durable yet",
    BlockReason.SIDECAR_DISCONNECTED: "the sidecar was disconnected",
    BlockReason.UNOPENED: "the store took no entry, so the attempt was not open",
    BlockReason.BACK_OFF: "a save had failed a moment before",
    BlockReason.RANKS: "the ranks did not agree on a step",
    BlockReason.VETOED: "validate() vetoed it",
    BlockReason.NOT_REQUESTED: "the sidecar did not request it",
}
"""Message of each reason, for people."""

REMEDY = {
    BlockReason.TORN: "let that optimizer complete a step, or restart from the newest checkpoint",
    BlockReason.STEPPED: "step() must be the last statement of the loop body",
    BlockReason.ACCUMULATING: "step the optimizers that the Checkpointer was given; after replacing one, build a new "
    "Checkpointer",
    BlockReason.MOVED: "step() must be the last statement of the loop body; ckpt.wrap(loader, pipelined=True) for a "
    "pipeline that fetches ahead; evaluate with torch.no_grad()",
    BlockReason.IN_FLIGHT: "check the store and the sidecar's log; if uploads only take long, save less often",
    BlockReason.SIDECAR_DISCONNECTED: "check the sidecar: its container, or its process on this machine",
    BlockReason.UNOPENED: "make room in the store, or let these credentials write to it",
    BlockReason.BACK_OFF: "check the store and the sidecar's log",
    BlockReason.RANKS: "call step(), and save() with a pin, on every rank after the same step",
    BlockReason.VETOED: "see validate=",
    BlockReason.NOT_REQUESTED: "check the sidecar: its process may be stopped",
}
"""Remedy of each reason, for a block that persists."""

_ALL_EXCEPT_CLOSE = frozenset(Asker) - {Asker.CLOSE}
_RULES: tuple[tuple[BlockReason, frozenset[Asker]], ...] = (
    (BlockReason.TORN, frozenset(Asker)),
    (BlockReason.STEPPED, frozenset(Asker)),
    (BlockReason.ACCUMULATING, _ALL_EXCEPT_CLOSE),
    (BlockReason.MOVED, _ALL_EXCEPT_CLOSE),
    (BlockReason.IN_FLIGHT, frozenset(Asker)),
    (BlockReason.SIDECAR_DISCONNECTED, frozenset(Asker)),
    (BlockReason.UNOPENED, frozenset(Asker)),
    (BlockReason.BACK_OFF, frozenset({Asker.TIMER, Asker.REQUEST, Asker.URGENT})),
)
_PROGRAM_REASONS = frozenset(
    {BlockReason.TORN, BlockReason.STEPPED, BlockReason.ACCUMULATING, BlockReason.MOVED}
)


@dataclass(frozen=True, slots=True)
class SnapshotGate:
    """The blocking reasons at one instant."""

    reasons: frozenset[BlockReason]

    @classmethod
    def of(
        cls,
        *,
        torn: bool = False,
        stepped: bool = False,
        accumulating: bool = False,
        moved: bool = False,
        in_flight: bool = False,
        away: bool = False,
        unopened: bool = False,
        backing_off: bool = False,
    ) -> SnapshotGate:
        facts = (torn, stepped, accumulating, moved, in_flight, away, unopened, backing_off)
        return cls(frozenset(reason for (reason, _), fact in zip(_RULES, facts, strict=True) if fact))

    def block_reason(self, asker: Asker) -> BlockReason | None:
        """Return the first reason that blocks `asker`, or None if the snapshot may be taken now."""
        return next((reason for reason, askers in _RULES if reason in self.reasons and asker in askers), None)

    @property
    def not_at_boundary(self) -> BlockReason | None:
        """Reason why the program is not at the boundary that a `step()` left, if so; waiting then cannot help."""
        return next((reason for reason, _ in _RULES if reason in self.reasons & _PROGRAM_REASONS), None)
