"""An epoch that one number of ranks began and another one ends: who gets what is left of it.

A position counts one rank's batches, which in another world are other samples. Two kinds of loader say more:

- *dealt*: a DataLoader whose `ResumableSampler`, or torch's `DistributedSampler`, deals the samples of one order out to
  the ranks in turns. Ranks take batches in step, so that after `n` batches each the first `n * batch size * ranks`
  samples of that order are used up. What is left of it is dealt out to the ranks that there are now, and again when
  their number changes once more.
- *shared*: every rank iterates the same batches and takes its share of each (`wrap(shared=True)`). Its position is
  one of all ranks, whichever their number.

Of any other loader nobody can tell which samples were used up. All ranks' positions are looked at: one that is not
where rank 0's is cannot be counted on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from deltashard.errors import CheckpointMismatch
from deltashard.loader.resumable_sampler import ResumableSampler, samplers_of
from deltashard.state.position import Position
from deltashard.state.value import encode_value

_ORDER = ("samples", "shuffle", "seed")
"""What says, with the epoch, in which order samples are dealt out."""


def order_of(loader: object) -> dict[str, Any] | None:
    """How samples are dealt out in the epoch that begins: its order, and the share of it that a batch of all ranks is.

    None: not by a sampler whose order is known, or not in batches of one size.
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
        "sampler": "ResumableSampler" if isinstance(sampler, ResumableSampler) else "DistributedSampler",
        "samples": samples,
        "shuffle": bool(sampler.shuffle),
        "seed": int(sampler.seed),
        "epoch": int(sampler.epoch),
        "world": world,
        "a_batch": (1 if batches is None else int(batches.batch_size)) * world,
    }


def used_up(position: Position) -> int:
    """Samples of a position's order that all ranks' batches have taken."""
    order = position.order
    base = position.dealt or {"at": 0, "used": 0}
    if order is None:
        return base["used"]
    used = base["used"] + (position.delivered - base["at"]) * int(order["a_batch"])
    return min(used, int(order["samples"]))


def misfit(saved: Mapping[str, Any], live: Mapping[str, Any] | None) -> str:
    """Why what is left of a saved order cannot be dealt out by the live loader; empty: it can."""
    kind = _kind(saved)
    if live is None or _kind(live) != kind:
        owner = "torch's" if kind == "DistributedSampler" else "a"
        return f"no DataLoader with {owner} {kind} deals them out now"
    for name in _ORDER:
        if saved[name] != live[name]:
            return f"the {kind} had {name}={saved[name]}, and has {live[name]}"
    if saved["world"] != live["world"]:
        return f"there are {saved['world']} ranks, and the {kind} deals out to {live['world']}"
    return ""


def _kind(order: Mapping[str, Any]) -> str:
    """Older checkpoints know one only."""
    return str(order.get("sampler", "DistributedSampler"))


def left_of(loader: DataLoader[Any], order: Mapping[str, Any], used: int) -> Iterable[Any]:
    """This rank's entries (batches, or samples where the loader makes none) of an order after `used` samples.

    Iterable again and again. `order` is what `order_of` said of the epoch.
    """
    live: Any = samplers_of(loader)[0]
    rest = (
        live.share(order["epoch"], used)
        if isinstance(live, ResumableSampler)
        else _left_of_torchs(live, order, used)
    )
    batches: Any = loader.batch_sampler
    return rest if batches is None else BatchSampler(rest, batches.batch_size, batches.drop_last)


def _left_of_torchs(live: Any, order: Mapping[str, Any], used: int) -> list[int]:
    """Torch's own rules: the order as one rank would get it, and the rest of it as if it were a dataset."""
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


def is_inside(tree: Mapping[str, Any]) -> bool:
    """Whether a saved position is within a pass."""
    return bool(tree["delivered"] or tree["inner"])


class Turnover:
    """Where one rank's loaders go on, when another number of ranks had saved, too."""

    def __init__(self, positions: dict[str, Any]) -> None:
        """`positions` by name, as this rank or, where it is new, rank 0 had them."""
        self.positions = positions
        self.notes: list[str] = []
        self.refused: dict[str, CheckpointMismatch] = {}
        """Loaders that cannot go on, by name."""
        self._saved: int | None = None
        """How many ranks had saved, where it is another number."""
        self._epochs: dict[str, int] = {}
        """In which one each would begin anew, on all ranks alike."""

    def take_over(
        self, name: str, trees: Mapping[int, Mapping[str, Any] | None], *, rank: int, saved: int, world: int
    ) -> None:
        """Loader `name` on `rank` of `world`, out of the positions that `saved` ranks had.

        `trees` are those by saved rank that this rank has read: rank 0's, its own, and some of ranks that are gone, so
        that all ranks together see all.
        """
        self._saved = saved
        known = [tree for tree in trees.values() if tree is not None]
        self._epochs[name] = (trees.get(0) or max(known, key=lambda tree: tree["epoch"]))["epoch"]
        if not any(is_inside(tree) for tree in known):
            return
        first = trees.get(0)
        why = _undealable(trees, saved)
        if untold := sorted(set(range(rank, saved, world)) - trees.keys()):
            why = f"where rank {untold[0]} was is not told: the sidecar is older than this library"
        if first is None or why:
            self.refused[name] = CheckpointMismatch(
                f"loader {name!r} was within an epoch when {saved} ranks saved, and there are {world} now: {why}",
                where="loaders",
                remedy=f"resume with {saved} ranks until the epoch ends and save there, or restore(strict=False), "
                "which begins that epoch's data anew; a DataLoader with a deltashard.ResumableSampler or torch's "
                "DistributedSampler, or one whose batches are the same on all ranks (wrap(shared=True)), goes on in "
                "another world",
            )
            return
        if first["deal"] == "shared":
            self.positions[name] = dict(first)
            self.notes.append(f"loader {name!r} goes on at batch {first['delivered']}, as on {saved} ranks")
            return
        mine, used = trees.get(rank), first["deal"]["used"]
        self.positions[name] = {
            **(_without_things(first) if mine is None else mine),
            "deal": {**first["deal"], "world": world},
            "order": None,
            "dealt": {"at": first["delivered"], "used": used},
            "prints": {},
        }
        self.notes.append(
            f"loader {name!r} was within epoch {first['epoch']} when {saved} ranks saved: what is left of it, "
            f"{first['deal']['samples'] - used} samples, is dealt out to {world}"
        )

    def begin_anew(self, names: Iterable[str]) -> None:
        """These begin their epoch anew, wherever they were: on every rank, if any rank cannot go on."""
        for name in names:
            if self._saved is None and name not in self.positions:
                continue  # another rank's
            quoted = f"loader {name!r} "
            epoch = self._epochs[name] if name in self._epochs else self.positions[name]["epoch"]
            self.positions[name] = {"epoch": epoch, "delivered": 0, "start": None, "inner": None}
            when = "" if self._saved is None else f" when {self._saved} ranks saved"
            self.notes = [note for note in self.notes if not note.startswith(quoted)] + [
                f"{quoted}was within an epoch{when}, and begins it anew"
            ]


def _undealable(trees: Mapping[int, Mapping[str, Any] | None], saved: int) -> str:
    first = trees.get(0)
    if first is None or any(tree is None for tree in trees.values()):
        return "it was not on every rank"
    deal = first.get("deal")
    if deal is None:
        return "which samples were used up cannot be told"
    if apart := [rank for rank, tree in trees.items() if tree is not None and _place(tree) != _place(first)]:
        return (
            f"rank {apart[0]} was elsewhere than rank 0, or had other batches, and ranks take batches in step"
        )
    if deal != "shared" and deal["world"] != saved:
        return f"its {_kind(deal)} dealt out to {deal['world']}, not to the {saved} ranks"
    return ""


def _place(tree: Mapping[str, Any]) -> bytes:
    """What is the same on all ranks that stand at one position, as bytes."""
    deal = tree.get("deal")
    place: list[Any] = [tree["epoch"], tree["delivered"], deal]
    if deal == "shared":
        place += [tree["inner"], tree.get("prints")]
    return encode_value(place).to_bytes()


def _without_things(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Without what lies below another rank's loader."""
    found = {**tree, "things": {}}
    for moment in ("start", "first"):
        if tree.get(moment) is not None:
            found[moment] = {**tree[moment], "things": {}}
    return found
