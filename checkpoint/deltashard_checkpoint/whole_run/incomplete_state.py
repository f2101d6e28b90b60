"""Detect what is left in place of a run: an interrupted removal or copy, or data without a log. Reads only.

A damaged log is not an incomplete run; its reader reports the damage.
"""

from __future__ import annotations

from enum import StrEnum

from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.log.entry import prefix_of, seq_of
from deltashard_checkpoint.log.folded_state import fold_of
from deltashard_checkpoint.log.listing import REMOVAL, Hint, listing
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store
from deltashard_checkpoint.write.closing import attempt_of_marker


class IncompleteState(StrEnum):
    """Short description of the incomplete state."""

    REMOVING = "being removed"
    COPYING = "half copied"
    NO_LOG = "no log"

    @property
    def remedy(self) -> str:
        return _REMEDY[self]


_REMEDY = {
    IncompleteState.REMOVING: "run `deltashard rm` again",
    IncompleteState.COPYING: "run `deltashard cp` again to continue (with -c: the same checkpoint, as seq:N); "
    "`deltashard rm --ended` removes it",
    IncompleteState.NO_LOG: "run `deltashard cp` again if a copy to this name was interrupted; "
    "`deltashard scan` lists the saves, `deltashard rm` removes them",
}


def incomplete_state(store: Store, root: str) -> IncompleteState | None:
    """Return what is left under `root` (the run's name and "/"; empty for the whole store); None: nothing, or a log.

    Raises store errors.
    """
    try:
        hint: bytes | None = store.get(f"{root}log/HINT")
    except ObjectNotFound:
        hint = None
    parsed_hint = Hint() if hint is None else Hint.of(hint)
    if parsed_hint == REMOVAL:
        return IncompleteState.REMOVING
    seen = listing((info.key[len(root) :] for info in store.list(f"{root}log/")), 0)
    if not parsed_hint.whole and seen.tip < parsed_hint.seq:
        return IncompleteState.COPYING
    if seen.seqs:
        return None
    if hint is not None or seen.folds:
        return IncompleteState.NO_LOG
    # These names sort before most other objects under the root.
    for begin in ("data/0", "data/compact-", "closing/0"):
        first = next(store.list(root + begin), None)
        if first is not None and is_run_key(first.key[len(root) :]):
            return IncompleteState.NO_LOG
    return None


def is_run_key(key: str) -> bool:
    """Return whether a key, relative to a run's root, can only belong to a run. Pure."""
    if key == "log/HINT" or seq_of(key) is not None or fold_of(key) is not None:
        return True
    if attempt_of_marker(key) is not None:
        return True
    try:
        prefix_of(key)
    except CorruptObject:
        return False
    return True
