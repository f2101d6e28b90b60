"""Classifies and identifies a loader, and opens passes over it at any batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from deltashard.errors import StateError, UserError
from deltashard.loader.fingerprint import fingerprint
from deltashard.loader.generator import apply, capture, own_generators, same
from deltashard.loader.position import DeliveryMark, LoaderPass, Position, SkippingSampler
from deltashard.loader.resumable_sampler import resumable_of
from deltashard.loader.sharding import batches_after, order_of
from deltashard.state.value import Stateful, decode_value

Skip = Literal["auto", "sampler", "replay"]
Kind = Literal["sampler", "counted", "stateful", "replayed", "factory"]

GUARANTEES: dict[Kind, str] = {
    "sampler": "resumes at the next sample of its order, with batches of any size",
    "counted": "resumes by skipping in its index sampler; nothing else is read again",
    "stateful": "resumes from its own state_dict()",
    "replayed": "resumes by reading the epoch again from its beginning",
    "factory": "resumes with factory(epoch, start)",
}


class LoaderAccess:
    """One loader and its kind; a stateful loader whose `state_dict()` fails falls back to `fallback`."""

    def __init__(self, loader: Any, *, skip: Skip, shared: bool) -> None:
        if isinstance(loader, Iterator):
            raise StateError(
                f"{type(loader).__name__} is an iterator, which can only be consumed once",
                where="wrap()",
                remedy="give the loader itself, a re-iterable, or a callable factory(epoch, start)",
            )
        if not callable(loader) and not isinstance(loader, Iterable):
            raise StateError(
                f"{type(loader).__name__} cannot be iterated",
                where="wrap()",
                remedy="give an iterable, or a callable factory(epoch, start)",
            )
        if skip not in ("auto", "sampler", "replay"):
            raise UserError(
                f"skip={skip!r} is unknown", where="wrap()", remedy='choose "auto", "sampler" or "replay"'
            )
        self.loader = loader
        self.skip = skip
        self.torch = isinstance(loader, DataLoader)
        self.workers: int = loader.num_workers if self.torch else 0
        self.resumable = resumable_of(loader)
        if shared and self.resumable is not None and self.resumable.world_size > 1:
            raise UserError(
                "shared=True means that all ranks iterate the same batches, and the ResumableSampler gives a share to "
                f"each of {self.resumable.world_size} ranks",
                where="wrap()",
                remedy="leave shared=True out, or give the sampler rank=0, world_size=1 on all ranks",
            )
        # A custom __iter__ may keep its own counter, so such a loader is replayed.
        self._plain = self.torch and type(loader).__iter__ is DataLoader.__iter__
        self._by_index = self._plain and not isinstance(loader.dataset, IterableDataset)
        self.fallback: Kind = "counted" if self._by_index and skip != "replay" else "replayed"
        self.kind: Kind = self.fallback
        if isinstance(loader, Stateful):
            self.kind = "stateful"
        elif callable(loader) and not isinstance(loader, Iterable):
            self.kind = "factory"
        elif self.kind == "counted" and self.resumable is not None and order_of(loader) is not None:
            self.kind = "sampler"
        self.persistent = bool(self.workers and loader.persistent_workers and self.kind != "stateful")
        self.workers_drew = False

    def identity(self) -> dict[str, Any]:
        """Return what must not change within an epoch, by name; `mismatch` decides which entries may."""
        loader = self.loader
        found: dict[str, Any] = {
            "kind": "its own state" if self.kind == "stateful" else "counted batches",
        }
        if self.torch:
            iterable = isinstance(loader.dataset, IterableDataset)
            if not iterable:
                found["samples"] = self._length(loader.dataset)
            found["batch_size"] = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            sampler = self.resumable or loader.sampler
            order = type(sampler).__name__
            if hasattr(sampler, "seed"):
                order += f"(seed={sampler.seed}, shuffle={getattr(sampler, 'shuffle', None)})"
            found["order"] = order
            world = sampler.world_size if self.resumable else getattr(sampler, "num_replicas", 1)
            found["shares"] = world
            found["workers"] = loader.num_workers
        return found

    def mismatch(self, saved: Position) -> str:
        """Return how this loader differs from the one that saved a position inside an epoch; empty: it does not."""
        if not saved.delivered or saved.ended:
            return ""
        if saved.kind != "stateful" and self.kind == "stateful":
            self.kind = self.fallback  # state_dict() failed in the lost process
        free = {"workers"} if self._by_index and self.kind != "stateful" and not saved.fetch_draws else set()
        same_order = saved.identity.get("order") == self.identity().get("order")
        if (saved.kind == self.kind == "sampler" and same_order) or "batch_size" not in saved.identity:
            free.add("batch_size")
        changed = self.changes(saved, ignore=free)
        if saved.base is not None and not changed and self.order(saved.epoch) is None:
            changed = [
                'skip="replay" rereads a whole epoch, but this epoch began on a different number of ranks'
            ]
        if not changed:
            return ""
        samples = f" ({saved.samples} samples)" if saved.samples else ""
        return (
            f"its position is after batch {saved.delivered}{samples} of epoch {saved.epoch}, but it has changed: "
            f"{', '.join(changed)}. It is unknown which samples those batches contained"
        )

    def changes(self, saved: Position, *, ignore: Container[str] = ()) -> list[str]:
        """Return one phrase per changed entry of the identity, except entries in `ignore`."""
        live, was = self.identity(), saved.identity
        return [
            f"{key} was {was.get(key)} and is {live.get(key)}"
            for key in {**was, **live}
            if was.get(key) != live.get(key) and key not in ignore
        ]

    def load_end_state(self, state: bytes, own: Mapping[str, Any]) -> None:
        """Load the `state` of the end of the last pass into a stateful loader; draws from generators are undone."""
        before = capture(own)
        try:
            self.loader.load_state_dict(decode_value(state))
            if self.torch:
                iter(self.loader)  # consumes the state; the iterator of the pass itself begins a new epoch
        finally:
            apply(before, own)

    def guarantee(self, *, unchecked: bool) -> str:
        fetch_draws = "; its workers draw random numbers, so all batches of the epoch are read again"
        check = "its batches hold nothing that can be compared: unchecked"
        check = check if unchecked else "the last batch is drawn again and compared"
        return f"{self.kind}: {GUARANTEES[self.kind]}{fetch_draws * self.workers_drew}; {check}"

    def is_epoch_complete(self, loader_pass: LoaderPass, mark: DeliveryMark) -> bool:
        if self.kind == "sampler" and loader_pass.order is not None:
            rest: Any = batches_after(self.loader, loader_pass.order, mark.samples)
            return len(rest) == 0
        return loader_pass.base is None and mark.delivered == self._length(self.loader)

    @staticmethod
    def _length(sized: Any) -> int | None:
        try:
            return len(sized)
        except (TypeError, NotImplementedError, AttributeError):
            return None

    def order(self, epoch: int) -> dict[str, Any] | None:
        """Return how an epoch's samples are shared among ranks; None: unknown, or batches are read, not skipped."""
        found = order_of(self.loader) if self.kind in ("sampler", "counted") else None
        return {**found, "epoch": epoch} if found is not None and self.resumable is not None else found

    def workers_live(self) -> bool:
        """Whether persistent workers are running, so that a new pass draws no seed."""
        return self.persistent and getattr(self.loader, "_iterator", None) is not None

    def open(
        self, loader_pass: LoaderPass, *, skip: int = 0, kind: Kind | None = None, last: int = 0
    ) -> None:
        """Begin `loader_pass` after `skip` batches; random draws happen here or at the first batch.

        `kind` defaults to the loader's; "replayed" reads all batches again. `last` is the number of samples in batch
        `skip + 1`, used if the loader's order is known, because the batch size may have changed since the restart.
        """
        kind = kind or self.kind
        if self.resumable is not None:
            self.resumable.set_epoch(loader_pass.epoch)
        loader_pass.sampler = None
        if kind == "factory":
            loader_pass.iterator = iter(self.loader(loader_pass.epoch, skip))
        elif not self._by_index or self.fallback == "replayed" or kind == "stateful":
            loader_pass.iterator = iter(self.loader)
        else:
            loader_pass.sampler = self._sampler(loader_pass, skip, kind, last)
            loader_pass.iterator = self._iterate_with(loader_pass, loader_pass.sampler)

    def _sampler(self, loader_pass: LoaderPass, skip: int, kind: Kind, last: int) -> SkippingSampler:
        loader, order, base = self.loader, loader_pass.order, loader_pass.base
        if kind == "sampler" and (skip or last) and order is not None:
            used = loader_pass.mark.samples
            rest = batches_after(loader, order, used)
            if last:
                batch = batches_after(loader, order, used - last * order["world"], size=last)
                rest = itertools.chain(itertools.islice(batch, 1), rest)
            return SkippingSampler(rest, skip=0, number=skip)
        if kind == "sampler" and order is not None:
            return SkippingSampler(batches_after(loader, order, 0), skip=0, number=0)
        if base is not None and order is not None:
            entries = batches_after(loader, order, base["samples"])
            return SkippingSampler(entries, skip=max(0, skip - base["delivered"]), number=skip)
        return SkippingSampler(loader.__dict__[self._sampler_attribute], skip=skip, number=skip)

    @property
    def _sampler_attribute(self) -> str:
        return "batch_sampler" if self.loader.batch_sampler is not None else "sampler"

    def _iterate_with(self, loader_pass: LoaderPass, sampler: SkippingSampler) -> Iterator[Any]:
        loader, live = self.loader, self.loader.__dict__.get("_iterator")
        if loader_pass.workers_were_running and live is not None:
            # Persistent workers take this pass's indices from here, the next pass's from the loader's own sampler.
            live._index_sampler = sampler  # noqa: SLF001 - torch offers no other way
            iterator = iter(loader)
            live._index_sampler = loader.__dict__[self._sampler_attribute]  # noqa: SLF001
            return self._unwrap_batches(iterator)
        # A shallow clone for this pass, because DataLoader forbids assigning its samplers.
        clone = copy.copy(loader)
        clone.__dict__.update({self._sampler_attribute: sampler, "_iterator": None})
        if self.workers:
            clone.__dict__["collate_fn"] = _WatchedCollate(loader.collate_fn)
        if loader_pass.workers_were_running:
            # The workers of the lost process were already running, so no seed was drawn.
            clone.__dict__["generator"] = torch.Generator()
        iterator = iter(clone)
        if self.persistent:
            live = loader.__dict__["_iterator"] = clone.__dict__["_iterator"]
            live._index_sampler = loader.__dict__[self._sampler_attribute]  # noqa: SLF001 - as above
        return self._unwrap_batches(iterator) if self.workers else iterator

    def _unwrap_batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch, fetch_draws in iterator:
            self.workers_drew |= fetch_draws
            yield batch


class _WatchedCollate:
    """A `collate_fn` that returns (batch, whether generators of its worker moved since the previous batch)."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        self._last: Mapping[str, Any] | None = None

    def __call__(self, items: Any) -> tuple[Any, bool]:
        batch, last = self._collate(items), self._last
        self._last = capture(own_generators(get_worker_info(), {}))
        return batch, last is not None and not same(last, self._last)


def indices_fingerprint(sampler: SkippingSampler | None, number: int) -> str | None:
    """Return the fingerprint of the indices of batch `number` (from 1), or None if unknown."""
    entry = None if sampler is None else sampler.entry(number)
    return None if entry is None else fingerprint(entry)
