"""Request and result of a `restore()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from deltashard.config import check_seconds
from deltashard.errors import UserError
from deltashard.loader.registry import OnChange


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Result of `restore()`."""

    step: int
    """Training continues after this step."""
    seq: int
    """Number of the checkpoint in the commit log."""
    attempt: int | None
    """The attempt that this process trains under; None: the store accepts no entry yet, so it is opened late."""
    source: str
    """"cache": every byte came from this machine; "store": at least one did not."""
    lost_steps: int | None
    """Steps that the previous trainer completed after this one; None if unknown (another machine)."""
    seconds: float
    """Duration from the call until the model is complete."""
    stored_bytes: int
    """Bytes read, as stored."""
    chain: tuple[int, ...]
    """Checkpoints whose frames were used, newest first."""
    fell_back: bool
    """A newer checkpoint is invalid, or may have been lost with a damaged log: see `notes`."""
    notes: tuple[str, ...] = ()
    """Entries lost with the log, mismatches that `strict=False` allowed, and differences of this process."""
    exact: bool = True
    """Whether all restored state is bit-identical to the snapshot's: nothing was rounded or converted, no recovery was
    partial, and `verified` is not False. `notes` lists what was left out."""
    verified: bool | None = None
    """Whether the snapshot's content hashes (`content_hash=True`) of stored rows equal those of the restored state;
    None: none were recorded, or none are comparable (other sharding, weights only)."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Tables whose weights are not bit-identical, and the encoding with the fewest bits among their stored rows, such
    as "q8"; empty: all are bit-identical."""
    rounded_state: Mapping[str, str] = field(default_factory=dict)
    """Tables with rounded optimizer state (`state_encoding="bf16"`), and its stored dtype."""
    mode: str = "full"
    """"full", or "partial": survivors of a lost rank kept their rows (`recovery="partial"`), which is not exact."""
    pls: float = 0.0
    """Portion of lost samples of the run so far; 0 unless a recovery was partial."""
    rank_steps: tuple[int, ...] = ()
    """By rank, after a partial recovery: the step of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """Arguments of `restore()`; raises `UserError` for invalid ones."""

    which: str
    from_run: str | None
    strict: bool
    weights_only: bool
    renames: Mapping[str, str]
    takeover: bool
    deadline_s: float
    hyperparameters: str
    """"checkpoint" or "script": the source of hyperparameters that differ between them."""
    loaders: OnChange = "restart"

    def __post_init__(self) -> None:
        check_seconds("deadline_s", self.deadline_s, off="leave deadline_s= out for five minutes")
        if self.hyperparameters not in ("checkpoint", "script"):
            raise UserError(
                f'hyperparameters= takes "checkpoint" or "script", not {self.hyperparameters!r}',
                where="restore()",
                remedy='leave it out to use the checkpoint\'s values; "script" keeps those of this script',
            )
        if self.loaders not in get_args(OnChange):
            raise UserError(
                f"loaders={self.loaders!r} is unknown",
                where="restore()",
                remedy='choose "restart", "continue" or "refuse"',
            )
