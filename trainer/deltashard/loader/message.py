"""Messages about wrapped loaders by kind: text, remedy and log level."""

from __future__ import annotations

from typing import Literal, NamedTuple

_DIFFERS = "batch {batch} of epoch {epoch} differs from the batch trained on before the restart"
_SOME_TWICE = "some samples of this epoch may be repeated, others skipped"
_PIPELINED = "Use wrap(pipelined=True) if something fetches ahead of the loop"
_AS_IT_WAS = "Keep the loader unchanged until the epoch ends, or choose restore(loaders="


class Message(NamedTuple):
    """Text templates that `LoaderRegistry.report` fills in."""

    what: str
    remedy: str = ""
    level: Literal["warning", "note", "info"] = "warning"
    """Notes go to `Restored.notes`, or to the log after the restore. A warning is logged once per process."""
    lasting: bool = False
    """The message holds for the whole run: a warning once per run, then a note after each restart."""
    strict: bool = False
    """Raised as an error with `wrap(strict=True)`."""


MESSAGES = {
    "content": Message(
        _DIFFERS + ": it has the same samples with different content. The position is correct",
        "Either the data changed, or the dataset draws random numbers that are not in the checkpoint (private "
        "generators, the time): derive them from the sample index, or pass the generators in state=",
        lasting=True,
        strict=True,
    ),
    "order": Message(
        f"{_DIFFERS}: the order of the loader has changed; {_SOME_TWICE}. Its data changed, or its sampler "
        "draws random numbers from elsewhere",
        "Give the sampler a generator, or use deltashard.ResumableSampler",
        strict=True,
    ),
    "other order": Message(
        f"{_DIFFERS}, although the first batch matches: the loader shares a generator with training, or keeps its own "
        f"position; {_SOME_TWICE}",
        "Give it a separate generator, or implement state_dict() and load_state_dict()",
        strict=True,
    ),
    "state": Message(
        f"{_DIFFERS}: its state_dict() does not contain everything that determines order and content, or its data "
        f"changed; {_SOME_TWICE}",
        "Derive the order from generator= or a seed, or use a DataLoader with deltashard.ResumableSampler",
        strict=True,
    ),
    "stream": Message(
        "it does not begin where epoch {epoch} began: its data changed, or it is a stream that cannot be "
        "rewound. No batch is skipped: training continues with the batch that it returned",
        "A stream needs state_dict() and load_state_dict(), or its offsets in state=",
        strict=True,
    ),
    "refused": Message(
        "its load_state_dict() rejected its saved state ({error}). Epoch {epoch} restarts, so its first {batch} "
        "batches are repeated",
        "Keep the loader unchanged until the epoch ends",
        strict=True,
    ),
    "identity": Message(
        "{why}. The epoch restarts, so its first {count} are repeated",
        _AS_IT_WAS + '"continue") or "refuse"',
        strict=True,
    ),
    "continued": Message(
        "{why}. The same number of batches is skipped: " + _SOME_TWICE, _AS_IT_WAS + '"restart")'
    ),
    "first": Message(
        "it is not known yet whether passes over {other!r} are nested in one of its batches: a run resumed from this "
        "checkpoint continues with its next batch",
        "Later checkpoints record it",
    ),
    "no batch": Message(
        "a step was taken without a new batch. Batches that are reused (itertools.cycle, a list, "
        "several steps on one batch, another source) are not in the checkpoint: a resumed run continues with the "
        "next batch of the loader",
        "Iterate the loader itself. " + _PIPELINED,
        lasting=True,
    ),
    "ahead": Message(
        "it delivered {batches} batches before the first step and one per step since: something fetches ahead, and "
        "a resumed run skips batches that were not trained on",
        _PIPELINED,
        lasting=True,
    ),
    "thread": Message(
        "it is iterated by another thread than the one that wrapped it: a resumed run may skip batches that "
        "were not trained on",
        _PIPELINED,
        lasting=True,
    ),
    "count": Message(
        "the loop ends its epochs after {batches} batches, but the resumed epoch had {resumed}: the loop "
        "uses its own counter",
        "Count with loader.delivered",
        lasting=True,
    ),
    "in_order": Message(
        "in_order=False delivers batches as workers finish: it is unknown which ones a resumed run must skip",
        "Remove in_order=False",
        lasting=True,
    ),
    "twice": Message(
        "two loops iterate it at once: only the position of the later one is saved",
        "Wrap a separate loader for each loop, each with its own name=",
        lasting=True,
    ),
    "no state": Message(
        "its state_dict() cannot be saved ({error}): its batches are counted instead",
        "No action is needed, unless the loader must resume from its own state",
        lasting=True,
    ),
    "next epochs": Message("it has changed for the following epochs: {changes}", level="note"),
    "seed": Message(
        "the seed of {names} differs from the one before the restart; the order of the checkpoint is kept",
        level="note",
    ),
    "read again": Message(
        "the first {batch} batches of epoch {epoch} are read again, so that random draws while samples are read "
        "are reproduced",
        'wrap(skip="sampler") avoids this (for datasets whose draws depend only on the sample)',
        level="info",
    ),
    "no step": Message(
        "a pass after restore() took no step: it began where training continues, not at the beginning of the epoch",
        "Run such a pass before restore(), or over the unwrapped loader",
        level="info",
    ),
    "continues": Message(
        "it continues after batch {batch} of epoch {epoch}. A counter of the loop itself (enumerate, range) starts "
        "at 0 again",
        "Start it at loader.delivered, and the epoch counter at loader.epoch",
        level="info",
    ),
    "drawn": Message(
        "random numbers were drawn between restore() and the first batch. Their effect on this epoch (its order, "
        "if it begins now; negative samples) matches the lost process only if that process drew them there, too",
        "Seed random draws at the beginning of an epoch by its number",
        level="info",
    ),
}
LASTING = frozenset(kind for kind, message in MESSAGES.items() if message.lasting)


def describe_error(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
