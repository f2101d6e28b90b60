"""The dense half of a checkpoint: decoded, compared with the program, and applied after all rows arrived.

Parameters are copied in place and never re-bound. Optimizer state lands in memory of its own with its saved type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.format.blob_name import common_blobs, optimizer_parts, own_blobs, parse_blob_name
from torch import Tensor

from deltashard.errors import CheckpointMismatch
from deltashard.loader.sharding import ResumePositions
from deltashard.optimizer import hyperparameter
from deltashard.optimizer.optimizer_state import OptimizerView
from deltashard.program import Program
from deltashard.state import contract, managed_collision, trained_parameter
from deltashard.state.origin import grow, may_grow
from deltashard.state.value import copy_tensor, decode_value
from deltashard.tracking.tracking import Tracking


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blobs:
    """The dense half of a checkpoint, decoded but not applied."""

    dense: dict[str, Tensor]
    optimizers: dict[int, list[Any]]
    """What is stored of each: rank 0's word, then what other ranks said of their parts."""
    state: dict[str, Any]
    rng: Any
    loaders: dict[str, Any]
    peer_loaders: dict[int, dict[str, Any]]
    """Positions of loaders by the rank that saved them: rank 0's, this rank's, and of ranks that are gone some."""
    meta: dict[str, Any]
    own_rng: bool
    """Whether `rng` is this rank's own; else rank 0's."""
    own_content: Any
    """The sums of content that this rank recorded; None: none."""

    @classmethod
    def decode(cls, raw: Mapping[str, memoryview], *, rank: int = 0) -> Blobs:
        """From the assembled blobs; accelerator tensors stay on the CPU until they are copied to their place.

        What a rank said for itself comes before what rank 0 said for all.
        """
        common, own = common_blobs(raw), own_blobs(rank, raw)
        content = decode_value(own["meta"]).get("content") if "meta" in own else None
        said = common | {name: data for name, data in own.items() if name != "meta"}
        held = {name: decode_value(data) for name, data in said.items() if not name.startswith("optim/")}

        def under(prefix: str) -> dict[str, Any]:
            return {n.removeprefix(prefix): value for n, value in held.items() if n.startswith(prefix)}

        return cls(
            dense=under("dense/"),
            optimizers={i: [decode_value(d) for d in said] for i, said in optimizer_parts(common).items()},
            state=under("state/"),
            rng=held.get("rng"),
            loaders=held.get("loader", {}),
            peer_loaders={
                owner or 0: decode_value(data)
                for (owner, name), data in ((parse_blob_name(stored), data) for stored, data in raw.items())
                if name == "loader"
            },
            meta=held.get("meta", {}),
            own_rng="rng" in own,
            own_content=content,
        )

    @property
    def world_size(self) -> int:
        return int(self.meta.get("world_size", 1))

    def loader_positions(self, rank: int, world_size: int) -> ResumePositions:
        """Where wrapped loaders go on, on a rank of a group of `world_size`."""
        found = ResumePositions(dict(self.loaders or {}))
        saved = self.world_size
        if world_size == saved:
            return found
        for name in sorted(
            found.positions.keys() | {name for trees in self.peer_loaders.values() for name in trees}
        ):
            trees = {peer: each.get(name) for peer, each in self.peer_loaders.items()}
            found.reshard(name, trees, rank=rank, saved=saved, world=world_size)
        return found

    def copied_from_peer(self, rank: int, world_size: int, names: Collection[str]) -> list[str]:
        """Notes on what ranks said for themselves in `state=`, under `names`, where their number is another now."""
        if world_size == self.world_size or not names:
            return []
        said = ", ".join(f"state[{name!r}]" for name in sorted(names))
        if rank >= self.world_size:
            return [f"rank {rank} was not in the group that saved: it has rank 0's {said}"]
        if rank == 0 and world_size < self.world_size:
            return [f"what ranks {world_size} to {self.world_size - 1} had in {said} is used by nobody"]
        return []

    def check(self, program: Program, *, strict: bool, weights_only: bool) -> list[str]:  # noqa: C901
        """Compare with the program before anything is changed; returns notes.

        Raises:
            CheckpointMismatch: with `strict`, anything that is missing, extra or of another shape or class.
        """
        faults: list[str] = []
        notes: list[str] = []
        tracking = program.tracking
        names = [source.name for source in program.sources]
        live = tracking.dense()
        saved = self._saved(tracking)
        keeps = "" if strict else ": it keeps its initial values"
        for name in sorted(saved.keys() | live.keys()):
            if name not in saved:
                faults.append(f"dense tensor {name} is not stored{keeps}")
            elif self._may_grow(tracking, name, saved[name], live.get(name)):
                continue
            elif name not in live:
                faults.append(f"dense tensor {name} is stored, the model has none")
            elif not _fits(saved[name], live[name]):
                faults.append(
                    f"dense tensor {name} is stored as {saved[name].dtype} {tuple(saved[name].shape)}, "
                    f"the model has {live[name].dtype} {tuple(live[name].shape)}{keeps}"
                )
        if not weights_only:
            if len(self.optimizers) != len(tracking.optimizers):
                faults.append(
                    f"{len(self.optimizers)} optimizers are stored, there are {len(tracking.optimizers)}"
                )
            for i, view in enumerate(tracking.optimizers):
                if (misfit := self._mismatch_reason(i, view)) is not None:
                    fate = "" if strict else ": it starts with no state of the checkpoint's"
                    faults.append(f"optimizer {i} {misfit} now{fate}")
            for i, view in enumerate(tracking.optimizers):
                faults += [
                    f"optimizer {i} has another shape of {name} than is stored{keeps}"
                    for name in self._reshaped_params(i, view)
                ]
            older = contract.missing_contracts(names, self.state, self.meta)
            notes += [f"{_source_label(name)} is not stored: an older version saved this" for name in older]
            for name in sorted((set(names) ^ self.state.keys()) - set(older)):
                what = "not stored" if name in names else "stored, but not given now"
                faults.append(f"{_source_label(name)} is {what}")
        if faults and strict:
            raise CheckpointMismatch(
                "; ".join(faults),
                where="dense state",
                remedy="build model, optimizers (with add_param_group()) and state= as they were, or "
                "restore(strict=False) to take what fits",
            )
        return notes + faults

    def mismatched_optimizers(self, tracking: Tracking) -> frozenset[int]:
        """Optimizers that do not fit the one stored in their place (class, groups): they keep their own state."""
        return frozenset(
            view.index
            for i, view in enumerate(tracking.optimizers)
            if self._mismatch_reason(i, view) is not None
        )

    def _mismatch_reason(self, position: int, view: OptimizerView) -> str | None:
        """How the optimizer stored in this place differs, in words; None when it fits, or none is stored."""
        stored = next(iter(self.optimizers.get(position, ())), None)
        if stored is None:
            return None
        if stored["class"] != view.class_name:
            return f"was a {stored['class']} and is a {view.class_name}"
        groups, live = len(stored["groups"]), len(view.target.param_groups)
        if groups == live:
            return None
        return f"had {groups} parameter groups and has {live}"

    def apply_dense(
        self, program: Program, *, strict: bool, weights_only: bool, script: bool = False
    ) -> list[str]:
        """Tensors, what modules say themselves, optimizers; returns notes on what did not fit.

        `script`: hyperparameters that this script gives otherwise than the one that saved stay this script's.
        """
        self.apply_tensors(program.tracking, strict=strict)
        notes = self._apply_modules(program, strict=strict)
        if weights_only:
            return notes
        notes += self.apply_optimizers(program.tracking, script=script)
        return notes + self._apply_parameters(program, script=script)

    def _apply_parameters(self, program: Program, *, script: bool) -> list[str]:
        """Which parameters are trained, and which have a gradient; an imported checkpoint does not say."""
        if "parameters" not in self.meta:
            return []
        aliases = program.tracking.inventory.aliases
        saved = {
            part: {aliases.get(name, name): value for name, value in held.items()}
            for part, held in self.meta["parameters"].items()
        }
        was, now = self.meta["given"]["trained"], program.given["trained"]
        changed = hyperparameter.differences(
            {aliases.get(name, name): value for name, value in was.items()}, now
        )
        if script:
            saved["trained"] |= {name: this for name, (_, this) in changed.items()}
        else:
            now |= {name: value for name, (value, _) in changed.items()}
        trained_parameter.restore(saved, program.parameters, program.tracking.steps.run_before_next_step)
        return hyperparameter.note("requires_grad", changed, script=script)

    def _apply_modules(self, program: Program, *, strict: bool) -> list[str]:
        """What modules say in their own state_dict; then their tensors once more, which loading may have converted."""
        notes = []
        for each in program.contracts:
            try:
                each.load(self.state.get(each.source.name, {}))
            except CheckpointMismatch as error:
                if strict:
                    raise
                notes.append(str(error))
        if program.contracts:
            self.apply_tensors(program.tracking, strict=strict)
        return notes

    def apply_state(self, program: Program, *, strict: bool, script: bool = False) -> list[str]:
        """Entries of `state=`; returns notes on what did not fit; `script`: see `apply_dense`."""
        notes: list[str] = []
        modules = {each.source.name for each in program.contracts}
        for source in program.sources:
            if source.name not in self.state or source.name in modules:
                continue
            held, key = self.state[source.name], f"state/{source.name}"
            was, now = self.meta.get("given", {}).get(key), program.given.get(key)
            if was is not None and now is not None:  # a scheduler
                changed = hyperparameter.differences(was, now)
                notes += hyperparameter.note(f"state[{source.name!r}]", changed, script=script)
                if script:
                    held = held | {name: this for name, (_, this) in changed.items()}
                else:
                    program.given[key] = was
            try:
                source.set(held)
            except CheckpointMismatch as error:
                if strict:
                    raise
                notes.append(f"{error}: it stays as it is")
        return notes

    def apply_tensors(self, tracking: Tracking, *, strict: bool) -> None:
        live = tracking.dense()
        for name, value in self._saved(tracking).items():
            target = live.get(name)
            if self._may_grow(tracking, name, value, target):
                grow(name, value, target, tracking.model)
            elif target is not None and (strict or _fits(value, target)):
                copy_tensor(target, value, where=f"dense tensor {name}")

    def apply_optimizers(self, tracking: Tracking, *, script: bool) -> list[str]:
        """Groups and state of the optimizers; what does not fit is left as it is, which `check` reported."""
        notes: list[str] = []
        mismatched_optimizers = self.mismatched_optimizers(tracking)
        for i, view in enumerate(tracking.optimizers):
            if i in self.optimizers and view.index not in mismatched_optimizers:
                tree, skip = view.merged(self.optimizers[i]), self._reshaped_params(i, view)
                notes += view.restore(tree, skip=skip, script=script)
        return notes

    def _saved(self, tracking: Tracking) -> dict[str, Tensor]:
        """Stored dense tensors by the model's names, but for those that it leaves out."""
        aliases = tracking.inventory.aliases
        named = {aliases.get(name, name): value for name, value in self.dense.items()}
        return {name: value for name, value in named.items() if name not in tracking.left_out}

    def _may_grow(self, tracking: Tracking, name: str, value: Tensor, live: Tensor | None) -> bool:
        if live is not None and _fits(value, live):
            return False
        return may_grow(name, value, live, self.meta.get("grown") or {}, tracking.model)

    def _reshaped_params(self, position: int, view: OptimizerView) -> list[str]:
        stored = next(iter(self.optimizers.get(position, ())), None)
        if stored is None:
            return []
        held = {**self.dense, **stored["orphans"]}
        return [
            name
            for name, param in view.params().items()
            if name in held and tuple(held[name].shape) != tuple(param.shape)
        ]


def _fits(stored: Tensor, live: Tensor) -> bool:
    return stored.shape == live.shape and stored.dtype == live.dtype


def _source_label(source: str) -> str:
    if source.startswith(managed_collision.COLLISIONS_PREFIX):
        return f"the history of ids of module {source.removeprefix(managed_collision.COLLISIONS_PREFIX)}"
    if source.startswith(contract.MODULE_PREFIX):
        return f"what module {source.removeprefix(contract.MODULE_PREFIX) or 'the model'} says in its state_dict()"
    return f"state[{source!r}]"
