"""Errors of the trainer, with `what`, `where` and `remedy`. docs/reference/errors.md lists them."""

from __future__ import annotations

from deltashard_checkpoint.errors import DeltashardError, EnvironmentFault, InternalBug, UserError

__all__ = [
    "AnotherTrainer",
    "CheckpointMismatch",
    "DeltashardError",
    "EnvironmentFault",
    "FencedError",
    "GroupLost",
    "InternalBug",
    "NotRestored",
    "RanksDiffer",
    "RestoreFailed",
    "SaveFailed",
    "SidecarGone",
    "SidecarUnavailable",
    "StateError",
    "TakenOver",
    "UserError",
    "WaitError",
]


class StateError(UserError):
    """An entry of `state=` or a part of an optimizer cannot be saved or restored exactly."""


class NotRestored(UserError):
    """Training started on a run that has checkpoints, without `restore()` and without `fresh=True`.

    Also raised after a `restore()` that failed after it had started to write into the model.
    """


class CheckpointMismatch(UserError):
    """The checkpoint and the model differ in tables, fields, dense tensors or optimizers."""


class WaitError(UserError):
    """`wait()` was called on the training thread before the snapshot was taken, which would deadlock."""


class AnotherTrainer(UserError):
    """A live process already trains this run on this machine: end that process, or choose another run."""


class RanksDiffer(UserError):
    """The ranks of a group differ in the run, the model or the call, or a rank is missing."""


class GroupLost(EnvironmentFault):
    """The store of the process group is unreachable, or a rank stopped answering."""


class SidecarUnavailable(EnvironmentFault):
    """The sidecar cannot be started or reached, or rejects this trainer. Its log has details."""


class SidecarGone(SidecarUnavailable):
    """The sidecar died, is stopping, or did not answer. Attach, open and restore retry with the next sidecar."""


class SaveFailed(EnvironmentFault):
    """A save did not become durable. Training may continue: the rows stay marked, and the next save covers them."""


class RestoreFailed(EnvironmentFault):
    """The checkpoint could not be read: the store or sidecar failed, or no complete checkpoint is left."""


class CheckpointRetired(RestoreFailed):
    """Another run's checkpoint was retired while it was read; request the newest one again."""


class FencedError(EnvironmentFault):
    """A newer attempt has taken over this run. This process must stop training and cannot open the run again."""


class TakenOver(FencedError):
    """Another workload (Job, JobSet, ...) trains this run; restarts of this workload are rejected.

    End the workload, or take the run back with `restore(takeover=True)`. Uncaught: exit code 79.
    """
