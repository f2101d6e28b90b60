"""Shares the rest of an epoch among ranks if their number changed within the epoch.

A position counts one rank's batches, which are different samples on another number of ranks. Two kinds of loader
provide more:

- a DataLoader whose `ResumableSampler`, or torch's `DistributedSampler`, gives each rank a share of one order. Ranks
  take batches in step, so the first `samples` samples of that order are used up. The rest is shared among the current
  ranks, again if their number changes once more;
- `wrap(shared=True)`: every rank iterates the same batches, so its position holds for any number of ranks.

For any other loader it is unknown which samples were used up, so its epoch restarts. The positions of all ranks are
compared: a position that differs from rank 0's counts as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from deltashard.loader.position import VERSION
from deltashard.loader.resumable_sampler import ResumableSampler, samplers_of
from deltashard.state.value import encode_value


def order_of(loader: object) -> dict[str, Any] | None:
    """Return how samples are shared among ranks in the epoch that begins, or None if the order is unknown.

    Keys: "samples", "shuffle", "seed", "epoch" of the whole order, and "world", the number of shares.
    """
    if not isinstance(loader, DataLoader):
        return None
    sampler, batches = samplers_of(loader)[0], loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return None
    if isinstance(sampler, ResumableSampler):
        samples, world = sampler.samples, sampler.world_size
    elif type(sampler) is DistributedSampler:
        data: Any = sampler.dataset
        samples, world = len(data), int(sampler.num_replicas)
    else:
        return None
    return {
        "samples": samples,
        "shuffle": bool(sampler.shuffle),
        "seed": int(sampler.seed),
        "epoch": int(sampler.epoch),
        "world": world,
    }


def batches_after(
    loader: DataLoader[Any], order: Mapping[str, Any], used: int, *, size: int = 0
) -> Iterable[Any]:
    """Return this rank's entries of an order after `used` samples; can be iterated repeatedly.

    Entries are batches, or samples if the loader makes no batches. `size` is the batch size; 0: the loader's.
    """
    live: Any = samplers_of(loader)[0]
    used = min(used, int(order["samples"])) if isinstance(live, DistributedSampler) else used
    rest = (
        live.share(order["epoch"], used)
        if isinstance(live, ResumableSampler)
        else _remaining_for_distributed(live, order, used)
    )
    batches: Any = loader.batch_sampler
    if batches is None:
        return rest
    return BatchSampler(rest, size or batches.batch_size, batches.drop_last and not size)


def _remaining_for_distributed(live: Any, order: Mapping[str, Any], used: int) -> list[int]:
    """Apply torch's own rules: the order of a single rank, and the rest of it as if it were a dataset."""
    samples: Any = range(order["samples"])
    whole: DistributedSampler[int] = DistributedSampler(
        samples, 1, 0, shuffle=order["shuffle"], seed=order["seed"]
    )
    whole.set_epoch(order["epoch"])
    rest: Any = list(whole)[used:]
    mine: DistributedSampler[int] = DistributedSampler(
        rest, live.num_replicas, live.rank, shuffle=False, drop_last=live.drop_last
    )
    return [rest[i] for i in mine]


class ResumePositions:
    """Resume positions of one rank's loaders, also after another number of ranks saved."""

    def __init__(self, positions: dict[str, Any]) -> None:
        """`positions`: by name, as saved by this rank or, if it is new, by rank 0."""
        self.positions = positions
        self.notes: list[str] = []
        self.refused: dict[str, str] = {}
        """{name: reason} of loaders that cannot resume within their epoch."""
        self._saved_by: int | None = None
        """Number of ranks that saved, if it differs from the current one."""
        self._epochs: dict[str, int] = {}

    def reshard(
        self, name: str, trees: Mapping[int, Mapping[str, Any] | None], *, rank: int, saved: int, world: int
    ) -> None:
        """Compute the position of loader `name` on `rank` of `world` from the positions that `saved` ranks had.

        `trees` are the positions that this rank has read, by saved rank: rank 0's, its own, and some of ranks that are
        gone. All ranks together read all positions.
        """
        self._saved_by = saved
        known = [tree for tree in trees.values() if tree is not None]
        self._epochs[name] = (trees.get(0) or max(known, key=lambda tree: tree["epoch"]))["epoch"]
        if not any(tree["delivered"] for tree in known):
            return
        first = trees.get(0)
        why = _unknown_reason(trees, saved)
        if missing := sorted(set(range(rank, saved, world)) - trees.keys()):
            why = f"the position of rank {missing[0]} was not read: the sidecar is older than this library"
        if first is None or why:
            self.refused[name] = (
                f"it was within epoch {self._epochs[name]} when {saved} ranks saved, but there are {world} "
                f"now: {why}. "
                "A DataLoader with a deltashard.ResumableSampler or torch's DistributedSampler, or one whose batches "
                "are the same on all ranks (wrap(shared=True)), resumes on another number of ranks"
            )
            return
        mine = trees.get(rank)
        if first["shared"]:
            self.positions[name] = dict(first)
            self.notes.append(f"loader {name!r} resumes at batch {first['delivered']}, as on {saved} ranks")
            return
        used = min(first["samples"], first["order"]["samples"])
        identity = {k: v for k, v in first["identity"].items() if k != "batch_size"}
        self.positions[name] = {
            **(first if mine is None else mine),
            "own": {} if mine is None else mine["own"],
            "samples": used,
            "order": {**first["order"], "world": world},
            "base": {"delivered": first["delivered"], "samples": used},
            "identity": identity | {"shares": world},
            "unchecked": True,
        }
        self.notes.append(
            f"loader {name!r} was within epoch {first['epoch']} when {saved} ranks saved: the "
            f"{first['order']['samples'] - used} "
            f"remaining samples are shared among {world}; its last batch is not compared"
        )

    def restart_epochs(self, names: Iterable[str], why: Mapping[str, str]) -> None:
        """Restart the epoch of these loaders: on every rank, if one rank cannot resume within it."""
        for name in names:
            if self._saved_by is None and name not in self.positions:
                continue  # a loader of another rank
            tree = self.positions.get(name, {})
            epoch = self._epochs.get(name, tree.get("epoch", 0))
            self.positions[name] = {"version": VERSION, "epoch": epoch, "reported": tree.get("reported", {})}
            quoted = f"loader {name!r} "
            reason = f": {why[name]}" if name in why else ": another rank cannot resume it"
            self.notes = [note for note in self.notes if not note.startswith(quoted)] + [
                f"{quoted}cannot resume within epoch {epoch}, which begins again{reason}"
            ]


def _unknown_reason(trees: Mapping[int, Mapping[str, Any] | None], saved: int) -> str:
    """Return why it is unknown which samples were used up; empty: it is known."""
    first = trees.get(0)
    if first is None or any(tree is None for tree in trees.values()):
        return "it was not on every rank"
    order = first["order"]
    if (order is None and not first["shared"]) or first["in_use"]:
        return "it is unknown which samples were used up"
    if apart := [
        rank
        for rank, tree in trees.items()
        if tree is not None and _position_key(tree) != _position_key(first)
    ]:
        return f"rank {apart[0]} had another position or other batches than rank 0, but ranks take batches in step"
    if not first["shared"] and order["world"] != saved:
        return f"its sampler had {order['world']} shares for {saved} ranks"
    return ""


def _position_key(tree: Mapping[str, Any]) -> bytes:
    place: list[Any] = [tree["epoch"], tree["delivered"], tree["shared"]]
    place.append(tree["fingerprint"] if tree["shared"] else tree["order"])
    return encode_value(place).to_bytes()
