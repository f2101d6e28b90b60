"""Everything of a cut that is no table row, as blobs: a name and a typed tree each.

    dense/<fqn>   one parameter or persistent buffer        loader   positions of the wrapped loaders
    optim/<i>     groups, dense state, scalars of tables    rng      the global generators
    state/<name>  an entry of the user's `state=`           meta     version, step, fingerprint, content hashes

In a group each rank saves the dense tensors that are its to save, rank 0 the optimizers (of one that is spread over
ranks, each its part), and each its own of the rest, under names of its own (`blob_name`): states and positions are a
rank's, and may differ.

They are encoded one after the other and refer to living tensors until they have been written into the arena, which
happens before the training thread goes on.
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
    """What every cut of one Checkpointer takes beside rows; on the training thread only."""

    def __init__(self, program: Program, loaders: LoaderRegistry, *, rank: Rank) -> None:
        """`loaders` has the wrapped ones; entries of `state=` that are wrapped are left to them."""
        self._rank = rank
        self._program = program
        self._loaders = loaders
        self._checked_scheduler = False

    def blobs(
        self, step: int, content: Mapping[str, str] | None, *, all_here: bool = False
    ) -> Iterator[tuple[str, EncodedTree]]:
        """(name, tree) of every blob of a cut at `step`; each must be written before the next is asked for.

        `content` has content hashes by table, if they are recorded. `all_here`: all that this rank has, whoever would
        save it, under plain names. Raises `StateError` or `SaveFailed` for an entry of `state=`.
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
        """At the first cut: what every resumed run would miss, and nobody would see."""
        if self._checked_scheduler:
            return
        self._checked_scheduler = True
        if (owner := self._program.unsaved_scheduler()) is not None:
            log.warning(
                "a learning-rate scheduler was built for %s and is not in state=: after a restore it begins anew. "
                'Give state={"scheduler": scheduler}; ckpt.doctor() says what else is not saved',
                owner,
            )


def _encoded(source: ValueSource) -> EncodedTree:
    """One entry of `state=`; raises `StateError` or `SaveFailed`, by name, whatever its getter raises."""
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
