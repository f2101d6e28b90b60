"""What is reported of wrapped loaders, in words: by kind, what happened and the remedy.

Kinds in `LASTING` hold as long as the program is the same: they are a warning once in a run, and a line of
`Restored.notes` after each restart. The others are found at a restart, and are a warning each time.
"""

from __future__ import annotations

LASTING = frozenset(["no batch", "ahead", "count", "in_order", "twice", "no state", "content", "thread"])
STRICT = frozenset(["content", "order", "other order", "stream", "state", "refused", "identity"])
"""What is an error with `wrap(strict=True)`."""

_DIFFERS = "batch {batch} of epoch {epoch} is not the one that was trained on before the restart"
_SOME_TWICE = "some samples of this epoch may come twice, others not at all"
_PIPELINED = "Use wrap(pipelined=True) where something fetches ahead of the loop"
_AS_IT_WAS = "Give the loader as it was until the epoch ends, or choose restore(loaders="

MESSAGES = {
    "content": (
        _DIFFERS + ": its samples are the same, their content is not. The position is right",
        (
            "Either the data changed, or the dataset draws random numbers that no checkpoint holds (own generators, "
            "the time): draw them from the sample's index, or give them in state="
        ),
    ),
    "order": (
        _DIFFERS
        + ": the order of the loader is another one, "
        + _SOME_TWICE
        + ". Its data changed, or its sampler "
        "draws random numbers elsewhere",
        "Give the sampler a generator, or use deltashard.ResumableSampler",
    ),
    "other order": (
        _DIFFERS
        + ", though the first one is: it draws from a generator that training draws from, too, or keeps a "
        "position of its own; " + _SOME_TWICE,
        "Give it a generator of its own, or state_dict() and load_state_dict()",
    ),
    "state": (
        _DIFFERS
        + ": its state_dict() does not hold everything that decides order and content, or its data changed; "
        + _SOME_TWICE,
        "Draw the order from generator= or a seed, or use a DataLoader with deltashard.ResumableSampler",
    ),
    "stream": (
        (
            "it does not begin where epoch {epoch} began: its data is another one, or it is a stream that cannot go "
            "back. Nothing is dropped: training continues with the batch that it gave"
        ),
        "A stream needs state_dict() and load_state_dict(), or its offsets in state=",
    ),
    "refused": (
        (
            "it does not accept its own state ({error}). Epoch {epoch} begins again, so that its first {batch} batches "
            "come twice"
        ),
        "Give the loader as it was until the epoch ends",
    ),
    "identity": (
        "{why}. The epoch begins again, so that its first {count} come twice",
        _AS_IT_WAS + '"continue") or "refuse"',
    ),
    "continued": (
        "{why}. As many batches are left out: " + _SOME_TWICE,
        _AS_IT_WAS + '"restart")',
    ),
    "first": (
        (
            "it was saved before it was known whether passes over {other!r} lie within one of its batches: a run that "
            "is resumed from this checkpoint continues with its next batch"
        ),
        "A later checkpoint knows",
    ),
    "no batch": (
        (
            "a step was taken without a new batch. Batches that are kept and used again (itertools.cycle, a list, "
            "several steps on one batch, another source) are not in the checkpoint: a resumed run continues with the "
            "next batch of the loader"
        ),
        "Iterate the loader itself. " + _PIPELINED,
    ),
    "ahead": (
        (
            "it delivered {batches} batches before the first step and one per step since: something fetches ahead, and "
            "a resumed run leaves out batches that were not trained on"
        ),
        _PIPELINED,
    ),
    "thread": (
        (
            "another thread asks it for batches than the one that wrapped it: a resumed run may leave out batches that "
            "were not trained on"
        ),
        _PIPELINED,
    ),
    "count": (
        (
            "the loop ends its epochs after {batches} batches, and the one that was resumed within had {resumed}: it "
            "counts on its own"
        ),
        "Count with loader.delivered",
    ),
    "in_order": (
        "in_order=False delivers batches as workers finish: which ones a resumed run must leave out is unknown",
        "Leave in_order=False out",
    ),
    "twice": (
        "two loops iterate it at once: only the position of the later one is saved",
        "Wrap a loader of its own for each loop, with a name= of its own",
    ),
    "no state": (
        "its state_dict() cannot be saved ({error}): its batches are counted instead",
        "Nothing needs to be done, unless the loader must resume from its own state",
    ),
}


def in_words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
