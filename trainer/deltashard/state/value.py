"""Encoding of torch objects as typed trees, without pickle.

`encode_value` and `decode_value` extend the typed tree with torch's leaf types: dense tensors as raw bytes (with their
dtype and whether they were on an accelerator), sparse COO tensors as their exact parts (an uncoalesced momentum buffer
stays uncoalesced: coalescing changes bits), `torch.Size`, `torch.dtype`, `torch.device`. Encoding refers to the
tensors' memory; the bytes are copied once, when they are written into the arena.

A `ValueSource` is one entry of the user's `state=`: a value that can be read at every snapshot and written at a
restore. A plain number is rejected, since a restore could not change the program's variable. A list, tuple or dict of
only stateful objects is accepted: each object is read and written separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from deltashard_checkpoint.format import element_type, typed_tree
from torch.utils.data import DataLoader

from deltashard.errors import CheckpointMismatch, StateError
from deltashard.state.discovery import dtype_name
from deltashard.state.rng import apply_own, capture_own, is_generator


@runtime_checkable
class Stateful(Protocol):
    """The `state_dict` protocol."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's elements as bytes, row-major; a view of its memory when it is a contiguous CPU tensor."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if flat.numel() == 0:
        return np.empty(0, np.uint8)
    return flat.view(torch.uint8).numpy()


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def unstorable_reason(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be stored; None: it can be."""
    kind = type(tensor)
    if kind.__module__.startswith("torch.distributed."):
        return "is sharded (a DTensor): this process holds a part of it only"
    if getattr(tensor, "_is_flat_param", False):
        return "is sharded (a flat parameter of FSDP): this process holds a part of it only"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.is_quantized:
        return "is a quantized tensor"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"has layout {str(tensor.layout).removeprefix('torch.')}"
    if not element_type.is_known(dtype_name(tensor.dtype)):
        return f"has type {dtype_name(tensor.dtype)}"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {kind.__name__}, whose memory is not its own"
    return None


def adapt(value: object) -> object:
    """Convert a torch value to a value of the typed tree; `NotImplemented` for any other value."""
    if isinstance(value, torch.Tensor):
        if (why := unstorable_reason(value)) is not None:
            raise StateError(
                f"a tensor that {why} cannot be stored", remedy="store its parts, or make it dense"
            )
        if value.layout == torch.sparse_coo:
            value = value.detach()
            return typed_tree.Tagged(
                tag="torch.sparse_coo",
                value={
                    "indices": value._indices(),  # noqa: SLF001 - the public accessor refuses uncoalesced tensors
                    "values": value._values(),  # noqa: SLF001
                    "shape": tuple(value.shape),
                    "coalesced": value.is_coalesced(),
                },
            )
        leaf = typed_tree.Tensor(
            dtype=dtype_name(value.dtype), shape=tuple(value.shape), data=raw_bytes(value).data
        )
        return leaf if value.device.type == "cpu" else typed_tree.Tagged(tag="torch.accelerator", value=leaf)
    if isinstance(value, torch.Size):
        return typed_tree.Tagged(tag="torch.Size", value=tuple(value))
    if isinstance(value, torch.dtype):
        return typed_tree.Tagged(tag="torch.dtype", value=dtype_name(value))
    if isinstance(value, torch.device):
        return typed_tree.Tagged(tag="torch.device", value=str(value))
    return NotImplemented


def _tensor(leaf: typed_tree.Tensor) -> torch.Tensor:
    dtype = getattr(torch, leaf.dtype)
    data = np.frombuffer(leaf.data, np.uint8) if len(leaf.data) else np.empty(0, np.uint8)
    # An explicit device, since the program may have set another default.
    flat = torch.empty(data.size, dtype=torch.uint8, device="cpu")
    flat.numpy()[:] = data
    if not data.size:
        return torch.empty(leaf.shape, dtype=dtype, device="cpu")
    return flat.view(dtype).reshape(leaf.shape)


def _untag(tag: str, value: Any) -> object:
    match tag:
        case "torch.accelerator":
            return value
        case "torch.sparse_coo":
            return torch.sparse_coo_tensor(
                value["indices"],
                value["values"],
                value["shape"],
                is_coalesced=value["coalesced"],
                check_invariants=True,  # the indices came from the store
                device=value["values"].device,
            )
        case "torch.Size":
            return torch.Size(value)
        case "torch.dtype" if isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
            return getattr(torch, value)
        case "torch.device" if isinstance(value, str):
            return torch.device(value)
    raise CheckpointMismatch(
        f"the checkpoint holds a value tagged {tag[:60]!r}, which this version does not know",
        where="state",
        remedy="update deltashard to the version that wrote it",
    )


def tensors_in(value: object, within: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Tensors of nested mappings, lists and tuples; `within`: ids of enclosing containers, to stop at cycles."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in within:
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each, within | {id(value)})


def encode_value(value: object) -> typed_tree.EncodedTree:
    """Encode a value, referring to the memory of its tensors; raises `typed_tree.UnsupportedValue` with the path."""
    return typed_tree.encode(value, adapt=adapt)


def decode_value(data: bytes | bytearray | memoryview) -> Any:
    """Decode a value; every tensor gets its own memory, on the CPU."""
    return typed_tree.decode(data, tensor=_tensor, untag=_untag)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """One named piece of state: `get` reads it at a snapshot, `set` writes it at a restore."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    subject: Any = None
    """The object itself, to recognize a wrapped loader."""


_MIXED = (
    "give an object with state_dict() and load_state_dict() its own entry, state={'name': object}, or keep such "
    "objects together in a list or dict without other values; those must be plain (numbers, text, tensors, arrays)"
)


def _refuse(name: str, value: object) -> StateError:
    return StateError(
        f"a plain {type(value).__name__} is frozen at construction: later values would never be saved or restored",
        where=f"state[{name!r}]",
        remedy="give a (get, set) pair of callables, a dict or list that you mutate, or an object with state_dict() "
        "and load_state_dict()",
    )


def _write_into(name: str, target: Any, value: Any) -> None:
    """Write `value` into an object of the program: a tensor, an array, a mapping or a sequence."""
    where = f"state[{name!r}]"
    if isinstance(target, torch.Tensor):
        copy_tensor(target, value, where=where)
    elif isinstance(target, np.ndarray):
        if not isinstance(value, np.ndarray) or value.shape != target.shape or value.dtype != target.dtype:
            raise CheckpointMismatch("array of another shape or type", where=where)
        target[...] = value
    elif isinstance(target, MutableMapping):
        if not isinstance(value, Mapping):
            raise CheckpointMismatch(f"holds a {type(value).__name__}, not a mapping", where=where)
        target.clear()
        target.update(value)
    else:
        target[:] = value


def copy_tensor(target: torch.Tensor, value: object, *, where: str) -> None:
    """`target.copy_(value)` under no_grad, for equal shape and dtype only; raises `CheckpointMismatch`."""
    if not isinstance(value, torch.Tensor) or value.shape != target.shape or value.dtype != target.dtype:
        held = (
            f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        )
        raise CheckpointMismatch(
            f"the checkpoint holds {held}, the program {target.dtype} {tuple(target.shape)}",
            where=where,
            remedy="construct the program as in the run that saved, or restore(strict=False) to leave it as it is",
        )
    if target.layout == torch.strided and 0 in target.stride() and target.numel():
        # Expanded: many elements share one memory location, which copy_() rejects.
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
        if not np.array_equal(raw_bytes(value[once].expand_as(value)), raw_bytes(value)):
            raise CheckpointMismatch(
                "its elements share memory here (expand()), and differ in the checkpoint",
                where=where,
                remedy="give it its own memory: expand(...).clone()",
            )
        target, value = target[once], value[once]
    with torch.no_grad():
        target.copy_(value)


def _members(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, Mapping) else dict(enumerate(container))


def _holds_stateful(value: Any) -> bool:
    """Whether the value is a non-empty list, tuple or mapping of only stateful objects."""
    if not isinstance(value, list | tuple | Mapping) or not value:
        return False
    return all(
        (isinstance(member, Stateful) and not isinstance(member, torch.Tensor)) or is_generator(member)
        for member in _members(value).values()
    )


def _combined_source(name: str, container: Any) -> ValueSource:
    def parts() -> dict[Any, ValueSource | None]:
        return {key: source(f"{name}.{key}", member) for key, member in _members(container).items()}

    def get() -> dict[Any, Any]:
        return {key: part.get() for key, part in parts().items() if part is not None}

    def put(held: Any) -> None:
        mine = parts()
        if not isinstance(held, Mapping) or held.keys() != mine.keys():
            stored = sorted(map(str, held)) if isinstance(held, Mapping) else type(held).__name__
            raise CheckpointMismatch(
                f"the checkpoint holds {stored}, the program {sorted(map(str, mine))}",
                where=f"state[{name!r}]",
                remedy="give the same objects as in the run that saved",
            )
        for key, part in mine.items():
            if part is not None:
                part.set(held[key])

    parts()  # reject members that cannot be saved now
    return ValueSource(name=name, get=get, set=put)


def source(name: str, value: Any) -> ValueSource | None:
    """The source for one entry of `state=`; None for a loader without state, whose position `wrap()` captures.

    Raises:
        StateError: the value cannot be read and written later (a number, a string, None, an optimizer).
    """
    if isinstance(value, torch.optim.Optimizer):
        raise StateError(
            "an optimizer in state= would be cast and aliased by its load_state_dict()",
            where=f"state[{name!r}]",
            remedy="pass it as optimizer=, several as a list",
        )
    if isinstance(value, Stateful):
        return ValueSource(name=name, get=value.state_dict, set=value.load_state_dict, subject=value)
    if _holds_stateful(value):
        return _combined_source(name, value)
    if is_generator(value):
        return ValueSource(name=name, get=lambda: capture_own(value), set=lambda held: apply_own(value, held))
    if isinstance(value, tuple) and len(value) == 2 and callable(value[0]) and callable(value[1]):
        return ValueSource(name=name, get=value[0], set=value[1])
    if isinstance(value, torch.Tensor | np.ndarray | MutableMapping | MutableSequence):
        return ValueSource(name=name, get=lambda: value, set=lambda held: _write_into(name, value, held))
    if isinstance(value, DataLoader):
        return None
    raise _refuse(name, value)


def sources(
    state: Mapping[str, Any] | None, *, refuse: Callable[[str, object], None] = lambda _name, _held: None
) -> list[ValueSource]:
    """Sources for all entries of `state=`; each is encoded and decoded once to reject values that cannot be saved.

    `refuse` gets each name and value as it would be stored, and raises if it must not be stored.

    Raises:
        StateError: a value, or a part of its state, cannot be stored; the message contains the path.
    """
    found = []
    for name, value in (state or {}).items():
        entry = source(name, value)
        if entry is None:
            continue
        held = entry.get()
        refuse(name, held)
        try:
            check_value(held, where=f"state[{name!r}]")
        except StateError as error:
            if isinstance(value, Mapping | list | tuple) and not isinstance(value, Stateful):
                raise StateError(error.what, where=error.where, remedy=_MIXED) from error
            raise
        found.append(entry)
    return found


def check_value(value: object, *, where: str) -> None:
    """Encode and decode once; raises `StateError` with the place and the path of a value that cannot be stored."""
    try:
        decode_value(encode_value(value).to_bytes())
    except (typed_tree.UnsupportedValue, StateError) as error:
        raise StateError(error.what, where=where, remedy=error.remedy) from error
