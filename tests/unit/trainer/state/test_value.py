"""Torch values through the typed tree, and which values `state=` accepts and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from deltashard.errors import CheckpointMismatch, StateError
from deltashard.state.value import decode_value, encode_value, source, sources


def round_trip(value: Any) -> Any:
    return decode_value(encode_value(value).to_bytes())


DTYPES = "float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4)])
def test_tensors_round_trip_with_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The cases include scalars, empty tensors, and types that numpy does not have."""
    value = (torch.rand(shape) * 10).to(dtype)
    back = round_trip({"t": value})["t"]
    assert back.dtype == dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)


def test_strided_and_conjugated_tensors_are_stored_by_value() -> None:
    base = torch.arange(12.0).view(3, 4)
    assert torch.equal(round_trip(base.t()), base.t())
    assert torch.equal(round_trip(base[:, ::2]), base[:, ::2])
    complex_value = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(round_trip(complex_value), complex_value.resolve_conj())


def test_uncoalesced_sparse_tensors_stay_uncoalesced() -> None:
    """Coalescing would change bits."""
    value = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=True
    )
    back = round_trip(value)
    assert not back.is_coalesced()
    assert torch.equal(back._indices(), value._indices())
    assert torch.equal(back._values(), value._values())


def test_mixed_torch_and_python_types_round_trip() -> None:
    value = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        1: (None, 2**80, {1, 2}),
        "lambdas": [None, {"a": 1.5}],
    }
    assert round_trip(value) == value


@pytest.mark.parametrize("value", [3, 2.5, "text", None, True, (1, 2), b"x"])
def test_values_that_cannot_be_restored_are_refused(value: Any) -> None:
    """A plain value cannot change in place. The message names the entry; the remedy is a pair or a mutable object."""
    with pytest.raises(StateError, match="get, set"):
        source("mine", value)
    with pytest.raises(StateError, match=r"state\['mine'\].*|deep"):
        sources({"mine": {"deep": [object()]}})
    with pytest.raises(CheckpointMismatch):  # broadcasting would corrupt the value silently
        source("mine", torch.zeros(4)).set(torch.zeros(1))


def test_all_supported_state_is_restored_in_place() -> None:
    box = [1]
    scheduler_like = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 2)
    values: dict[str, Any] = {
        "pair": (lambda: box[0], lambda v: box.__setitem__(0, v)),
        "dict": {"a": [1, 2]},
        "list": [1, {"b": 2}],
        "tensor": torch.arange(4.0),
        "array": np.arange(4),
        "torch": torch.Generator().manual_seed(1),
        "numpy": np.random.default_rng(1),
        "python": __import__("random").Random(1),
        "scheduler": scheduler_like,
    }
    found = sources(values)
    held = {each.name: round_trip(each.get()) for each in found}
    draws = (torch.rand(2, generator=values["torch"]), values["numpy"].random(2), values["python"].random())
    box[0] = 7
    values["dict"]["a"].append(3)
    values["list"].clear()
    values["tensor"].fill_(0)
    values["array"][:] = 0
    for each in found:
        each.set(held[each.name])
    again = (torch.rand(2, generator=values["torch"]), values["numpy"].random(2), values["python"].random())
    assert box == [1]
    assert values["dict"] == {"a": [1, 2]}
    assert values["list"] == [1, {"b": 2}]
    assert values["tensor"].tolist() == [0, 1, 2, 3]
    assert values["array"].tolist() == [0, 1, 2, 3]
    assert torch.equal(draws[0], again[0])
    assert draws[1].tolist() == again[1].tolist()
    assert draws[2] == again[2]


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_containers_of_stateful_objects_are_restored(kind: type) -> None:
    def members(seed: int) -> Any:
        torch.manual_seed(seed)
        objects = [torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.Generator().manual_seed(seed)]
        return {"a": objects[0], "b": objects[1], 3: objects[2]} if kind is dict else kind(objects)

    def values(held: Any) -> list[Any]:
        return list(held.values() if kind is dict else held)

    saved, again = members(1), members(2)
    (mine,), (other,) = sources({"all": saved}), sources({"all": again})
    other.set(round_trip(mine.get()))
    assert torch.equal(values(saved)[0].weight, values(again)[0].weight)
    assert torch.equal(torch.rand(3, generator=values(saved)[2]), torch.rand(3, generator=values(again)[2]))
    fewer = {"a": saved["a"]} if kind is dict else kind(saved[:1])
    with pytest.raises(CheckpointMismatch, match="the checkpoint holds"):
        sources({"all": fewer})[0].set(round_trip(mine.get()))


def test_mixed_container_is_refused_with_a_remedy() -> None:
    """The remedy is not "plain values by state_dict()": such a copy would be saved forever and never loaded."""
    module = torch.nn.Linear(2, 2)
    with pytest.raises(StateError, match="cannot be stored") as caught:
        sources({"all": {"module": module, "best": 0.5}})
    assert "its own entry" in caught.value.remedy
    with pytest.raises(StateError, match="optimizer"):
        sources({"all": [torch.optim.Adam(module.parameters())]})
