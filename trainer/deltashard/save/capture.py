"""Everything of a cut that is no table row, as blobs: a name and a typed tree each.

    dense/<fqn>   one parameter or persistent buffer        loader   positions of the wrapped loaders
    optim/<i>     groups, dense state, scalars of tables    rng      the global generators
    state/<name>  an entry of the user's `state=`           meta     version, step, fingerprint, content hashes

They are encoded one after the other and refer to living tensors until they have been written into the arena, which
happens before the training thread goes on. The generators are read first: asking a loader for its state may create
its iterator, which draws; they are put back afterwards, so that a cut leaves no trace in the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deltashard_checkpoint.format.typed_tree import EncodedTree, UnsupportedValue
from torch import Tensor

from deltashard.attach.interruption import leaves
from deltashard.errors import SaveFailed, StateError
from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.state.position import Stateful
from deltashard.state.rng import apply_globals, capture_globals
from deltashard.state.value import Source, encode_value
from deltashard.tracking.tracking import Tracking


def blobs_of(
    tracking: Tracking,
    dense: Mapping[str, Tensor],
    sources: Sequence[Source],
    loaders: Mapping[str, WrappedLoader],
    waiting: Mapping[str, Any],
    meta: Mapping[str, Any],
) -> Iterator[tuple[str, EncodedTree]]:
    """Yield (name, tree) of every blob; each must be written before the next is asked for.

    Args:
        tracking: holds the optimizers.
        dense: parameters and buffers that are no tables, live, by name.
        sources: entries of `state=`; those that are wrapped as loaders are left to them.
        loaders: wrapped loaders by name.
        waiting: restored positions of loaders that were not wrapped yet.
        meta: the `meta` blob.
    """
    rng: Any = capture_globals()
    moved = [r for r in (loader.boundary_rng() for loader in loaders.values()) if r is not None]
    positions = {name: loader.capture() for name, loader in loaders.items()}
    wrapped = [loader.loader for loader in loaders.values()]
    if any(isinstance(loader, Stateful) for loader in wrapped):
        apply_globals(rng)
    for name, tensor in dense.items():
        yield f"dense/{name}", encode_value(tensor)
    for view in tracking.optimizers:
        yield f"optim/{view.index}", encode_value(view.capture())
    for source in sources:
        if not any(source.subject is loader for loader in wrapped):
            yield f"state/{source.name}", _encoded(source)
    yield "loader", encode_value(positions | dict(waiting))
    yield "rng", encode_value(moved[0] if moved else rng)
    yield "meta", encode_value(dict(meta))


def _encoded(source: Source) -> EncodedTree:
    """One entry of `state=`; raises `StateError` or `SaveFailed`, by name, whatever its getter raises."""
    where = f"state[{source.name!r}]"
    try:
        return encode_value(source.get())
    except (StateError, UnsupportedValue) as error:
        raise StateError(error.what, where=where, remedy=error.remedy) from error
    except Exception as error:
        if leaves(error):
            raise
        raise SaveFailed(
            f"reading it raised {type(error).__name__}: {error}",
            where=where,
            remedy="its getter must return what it returned at construction: plain values, tensors, arrays",
        ) from error
