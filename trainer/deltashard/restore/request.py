"""What goes into a `restore()`, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from deltashard.config import check_seconds
from deltashard.errors import UserError
from deltashard.loader.registry import OnChange


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `restore()` brought back."""

    step: int
    """Training goes on after this step."""
    seq: int
    """Number of the checkpoint in the commit log."""
    attempt: int | None
    """The attempt that this process trains under; None: the store takes no entry yet, so it is opened late."""
    source: str
    """"cache": every byte came from this machine; "store": at least one did not."""
    lost_steps: int | None
    """Steps the lost trainer had done beyond this one; None when nobody saw them (another machine)."""
    seconds: float
    """From the call to the model being whole."""
    stored_bytes: int
    """Bytes read, as stored."""
    chain: tuple[int, ...]
    """Checkpoints whose frames were used, newest first."""
    fell_back: bool
    """A newer checkpoint exists but is not whole, or may have been lost with a damaged log: see `notes`."""
    notes: tuple[str, ...] = ()
    """Entries lost with the log, what did not match and was let pass (`strict=False`), what differs of this process."""
    exact: bool = True
    """Whether all that was restored is bit for bit what the program had at the cut: nothing was rounded or converted,
    no recovery was partial, and `verified` is not False. What was left out is in `notes`."""
    verified: bool | None = None
    """Whether content hashes taken at the cut (`content_hash=True`), of rows as they are stored, equal those of the
    restored state; None: none were recorded, or none can be compared (another sharding, weights only)."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Tables whose weights did not come back bit for bit, and the encoding with the fewest bits that they were stored
    with, such as "q8"; empty: all did."""
    rounded_state: Mapping[str, str] = field(default_factory=dict)
    """Tables of whose optimizer state some did not (`state_encoding="bf16"`), and the type that it was stored in."""
    mode: str = "full"
    """"partial": survivors of a lost rank kept their rows (`recovery="partial"`), which is not exact."""
    pls: float = 0.0
    """Portion of lost samples of the run so far; 0 unless a recovery was partial."""
    rank_steps: tuple[int, ...] = ()
    """By rank, after a partial recovery: the step that its rows are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What `restore()` was called with; raises `UserError` for what cannot be meant."""

    which: str
    from_run: str | None
    strict: bool
    weights_only: bool
    renames: Mapping[str, str]
    takeover: bool
    deadline_s: float
    hyperparameters: str
    """"checkpoint" or "script": whose are in force where both scripts gave different ones."""
    loaders: OnChange = "restart"

    def __post_init__(self) -> None:
        check_seconds("deadline_s", self.deadline_s, off="leave deadline_s= out for five minutes")
        if self.hyperparameters not in ("checkpoint", "script"):
            raise UserError(
                f'hyperparameters= takes "checkpoint" or "script", not {self.hyperparameters!r}',
                where="restore()",
                remedy='leave it out to take the checkpoint\'s; "script" keeps what this script gives',
            )
        if self.loaders not in get_args(OnChange):
            raise UserError(
                f"loaders={self.loaders!r} is unknown",
                where="restore()",
                remedy='choose "restart", "continue" or "refuse"',
            )
