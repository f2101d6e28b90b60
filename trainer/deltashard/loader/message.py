"""What is reported of wrapped loaders, as one table: by kind, what happened, the remedy, and how it is reported."""

from __future__ import annotations

from typing import Literal, NamedTuple

_DIFFERS = "batch {batch} of epoch {epoch} is not the one that was trained on before the restart"
_SOME_TWICE = "some samples of this epoch may come twice, others not at all"
_PIPELINED = "Use wrap(pipelined=True) where something fetches ahead of the loop"
_AS_IT_WAS = "Give the loader as it was until the epoch ends, or choose restore(loaders="


class Message(NamedTuple):
    """Texts with fields in braces; `report` fills them in."""

    what: str
    remedy: str = ""
    level: Literal["warning", "note", "info"] = "warning"
    """A note is a line of `Restored.notes`, or of the log where the restore is over. A warning comes once a process."""
    lasting: bool = False
    """It holds as long as the program is the same: a warning once in a run, and a note after each restart."""
    strict: bool = False
    """An error with `wrap(strict=True)`."""


MESSAGES = {
    "content": Message(
        _DIFFERS + ": its samples are the same, their content is not. The position is right",
        "Either the data changed, or the dataset draws random numbers that no checkpoint holds (own generators, "
        "the time): draw them from the sample's index, or give them in state=",
        lasting=True,
        strict=True,
    ),
    "order": Message(
        f"{_DIFFERS}: the order of the loader is another one, {_SOME_TWICE}. Its data changed, or its sampler "
        "draws random numbers elsewhere",
        "Give the sampler a generator, or use deltashard.ResumableSampler",
        strict=True,
    ),
    "other order": Message(
        f"{_DIFFERS}, though the first one is: it draws from a generator that training draws from, too, or keeps a "
        f"position of its own; {_SOME_TWICE}",
        "Give it a generator of its own, or state_dict() and load_state_dict()",
        strict=True,
    ),
    "state": Message(
        f"{_DIFFERS}: its state_dict() does not hold everything that decides order and content, or its data changed; "
        f"{_SOME_TWICE}",
        "Draw the order from generator= or a seed, or use a DataLoader with deltashard.ResumableSampler",
        strict=True,
    ),
    "stream": Message(
        "it does not begin where epoch {epoch} began: its data is another one, or it is a stream that cannot go "
        "back. Nothing is dropped: training continues with the batch that it gave",
        "A stream needs state_dict() and load_state_dict(), or its offsets in state=",
        strict=True,
    ),
    "refused": Message(
        "it does not accept its own state ({error}). Epoch {epoch} begins again, so that its first {batch} batches "
        "come twice",
        "Give the loader as it was until the epoch ends",
        strict=True,
    ),
    "identity": Message(
        "{why}. The epoch begins again, so that its first {count} come twice",
        _AS_IT_WAS + '"continue") or "refuse"',
        strict=True,
    ),
    "continued": Message("{why}. As many batches are left out: " + _SOME_TWICE, _AS_IT_WAS + '"restart")'),
    "first": Message(
        "it was saved before it was known whether passes over {other!r} lie within one of its batches: a run that "
        "is resumed from this checkpoint continues with its next batch",
        "A later checkpoint knows",
    ),
    "no batch": Message(
        "a step was taken without a new batch. Batches that are kept and used again (itertools.cycle, a list, "
        "several steps on one batch, another source) are not in the checkpoint: a resumed run continues with the "
        "next batch of the loader",
        "Iterate the loader itself. " + _PIPELINED,
        lasting=True,
    ),
    "ahead": Message(
        "it delivered {batches} batches before the first step and one per step since: something fetches ahead, and "
        "a resumed run leaves out batches that were not trained on",
        _PIPELINED,
        lasting=True,
    ),
    "thread": Message(
        "another thread asks it for batches than the one that wrapped it: a resumed run may leave out batches that "
        "were not trained on",
        _PIPELINED,
        lasting=True,
    ),
    "count": Message(
        "the loop ends its epochs after {batches} batches, and the one that was resumed within had {resumed}: it "
        "counts on its own",
        "Count with loader.delivered",
        lasting=True,
    ),
    "in_order": Message(
        "in_order=False delivers batches as workers finish: which ones a resumed run must leave out is unknown",
        "Leave in_order=False out",
        lasting=True,
    ),
    "twice": Message(
        "two loops iterate it at once: only the position of the later one is saved",
        "Wrap a loader of its own for each loop, with a name= of its own",
        lasting=True,
    ),
    "no state": Message(
        "its state_dict() cannot be saved ({error}): its batches are counted instead",
        "Nothing needs to be done, unless the loader must resume from its own state",
        lasting=True,
    ),
    "next epochs": Message("it is another one for the epochs that follow: {changes}", level="note"),
    "seed": Message(
        "{names} was seeded with another number than before the restart; the order of the checkpoint continues",
        level="note",
    ),
    "read again": Message(
        "the first {batch} batches of epoch {epoch} are read again, so that what is drawn while samples are read is "
        "as it was",
        'wrap(skip="sampler") leaves that out (for datasets that draw by the sample)',
        level="info",
    ),
    "no step": Message(
        "a pass after restore() took no step: it began where training continues, not at the beginning of the epoch",
        "Make it before restore(), or over the loader that is not wrapped",
        level="info",
    ),
    "continues": Message(
        "it continues after batch {batch} of epoch {epoch}. A counter of the loop itself (enumerate, range) begins "
        "at 0 again",
        "Begin it at loader.delivered, and that of the epochs at loader.epoch",
        level="info",
    ),
    "drawn": Message(
        "random numbers were drawn between restore() and the first batch. What they decide in this epoch (its order, "
        "if it begins now; negative samples) is that of the lost process only if that drew them there, too",
        "Seed by epoch what is drawn at the head of one",
        level="info",
    ),
}
LASTING = frozenset(kind for kind, message in MESSAGES.items() if message.lasting)


def describe_error(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
