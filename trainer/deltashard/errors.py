"""The trainer's errors. Each says what, where and the remedy; its family says who can act (user, surroundings, us)."""

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
    """Something given in `state=`, or found in the optimizer, cannot be saved or restored exactly."""


class NotRestored(UserError):
    """Training began on a run that has checkpoints, without `restore()` and without `fresh=True`.

    Or after a `restore()` that failed when it had begun to write into the model.
    """


class CheckpointMismatch(UserError):
    """The checkpoint and the model disagree about tables, fields, dense tensors or optimizers."""


class WaitError(UserError):
    """`wait()` on the training thread before the cut happened would wait for itself."""


class AnotherTrainer(UserError):
    """A live process already trains this run on this machine."""


class RanksDiffer(UserError):
    """The ranks of a group do not say the same of the run, the model or the call, or some of them are missing."""


class GroupLost(EnvironmentFault):
    """The store of the process group is gone, or a rank stopped answering."""


class SidecarUnavailable(EnvironmentFault):
    """The sidecar cannot be started or reached, or refuses this trainer."""


class SidecarGone(SidecarUnavailable):
    """The sidecar died, stops, or did not answer: the next one may. Attach, open and restore try again."""


class SaveFailed(EnvironmentFault):
    """A save that was waited for did not become durable."""


class RestoreFailed(EnvironmentFault):
    """The checkpoint could not be read: the store or the sidecar failed, or no whole checkpoint is left."""


class CheckpointRetired(RestoreFailed):
    """Another run's checkpoint was retired while it was read: ask for its newest anew."""


class FencedError(EnvironmentFault):
    """A newer attempt has taken over this run: this process must not train on. Never re-opened from here."""


class TakenOver(FencedError):
    """Another workload (Job, JobSet, ...) trains this run now: restarts of this one are refused, too.

    Uncaught, it ends the process with exit code 79 (`exit_code.EXIT_TAKEN_OVER`).
    """
