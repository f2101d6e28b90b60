"""The parts of a snapshot other than table rows, as blobs: pairs of a name and a typed tree.

    dense/<fqn>   one parameter or persistent buffer        loader   positions of the wrapped loaders
    optim/<i>     groups, dense state, scalars of tables    rng      the global generators
    state/<name>  an entry of the user's `state=`           meta     version, step, fingerprint, content hashes

In a group, each rank saves its share of the dense tensors, rank 0 saves the optimizers (for a partitioned optimizer,
each
rank saves its part), and each rank saves its own state, positions and generators under rank-specific names
(`blob_name`).

Blobs are encoded one at a time. They refer to live tensors until they are written into the arena, before training
continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from deltashard_checkpoint.format.blob_name import blob_name, optimizer_name
from deltashard_checkpoint.format.typed_tree import EncodedTree, UnsupportedValue

from deltashard.attach.interruption import must_propagate
from deltashard.attach.rank import Rank
from deltashard.errors import SaveFailed, StateError
from deltashard.loader.registry import LoaderRegistry
from deltashard.program import Program
from deltashard.state.value import ValueSource, encode_value

log = logging.getLogger("deltashard")


class Capture:
    """Captures the blobs of a snapshot; used on the training thread only."""

    def __init__(self, program: Program, loaders: LoaderRegistry, *, rank: Rank) -> None:
        """Entries of `state=` that are wrapped in `loaders` are saved by the loaders."""
        self._rank = rank
        self._program = program
        self._loaders = loaders
        self._checked_scheduler = False

    def blobs(
        self, step: int, content: Mapping[str, str] | None, *, all_here: bool = False
    ) -> Iterator[tuple[str, EncodedTree]]:
        """Yield (name, tree) for each blob of a snapshot at `step`; write each one before requesting the next.

        Args:
            step: Step of the snapshot.
            content: Content hashes by table, if recorded.
            all_here: Yield all state of this rank under plain names, regardless of which rank saves it.

        Raises:
            StateError, SaveFailed: An entry of `state=` cannot be read or stored.
        """
        program = self._program
        dense = program.tracking.dense(look=False)
        self._warn_unsaved_scheduler()
        meta = program.meta(dense, step=step, content=content, world_size=self._rank.world_size)
        rng, positions = self._loaders.capture()
        wrapped = [loader.loader for loader in self._loaders.loaders.values()]
        for name, tensor in dense.items():
            if all_here or program.tracking.saves(name):
                yield f"dense/{name}", encode_value(tensor)
        own = (lambda name: name) if all_here else self._own
        for view in program.tracking.optimizers:
            if all_here:
                yield optimizer_name(view.index, 0), encode_value(view.capture_local())
            elif self._rank.number == 0 or (view.is_partitioned and program.tracking.saved):
                yield optimizer_name(view.index, self._rank.number), encode_value(view.capture())
        for source in program.sources:
            if not any(source.subject is loader for loader in wrapped):
                yield own(f"state/{source.name}"), _encoded(source)
        yield own("loader"), encode_value(positions)
        yield own("rng"), encode_value(rng)
        yield own("meta"), encode_value(meta)

    def _own(self, name: str) -> str:
        return blob_name(self._rank.number, name)

    def _warn_unsaved_scheduler(self) -> None:
        if self._checked_scheduler:
            return
        self._checked_scheduler = True
        if (owner := self._program.unsaved_scheduler()) is not None:
            log.warning(
                "a learning-rate scheduler was built for %s and is not in state=: a restore resets it. "
                'Pass state={"scheduler": scheduler}; ckpt.doctor() lists what else is not saved',
                owner,
            )


def _encoded(source: ValueSource) -> EncodedTree:
    """Encode one entry of `state=`; any error of its getter becomes a `StateError` or `SaveFailed` with its name."""
    where = f"state[{source.name!r}]"
    try:
        return encode_value(source.get())
    except (StateError, UnsupportedValue) as error:
        raise StateError(error.what, where=where, remedy=error.remedy) from error
    except Exception as error:
        if must_propagate(error):
            raise
        raise SaveFailed(
            f"reading it raised {type(error).__name__}: {error}",
            where=where,
            remedy="its getter must return what it returned at construction: plain values, tensors, arrays",
        ) from error
