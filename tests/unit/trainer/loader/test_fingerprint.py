"""Fingerprints of batches: equal content has an equal fingerprint, and content that cannot be hashed is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from deltashard.loader.fingerprint import fingerprint


@dataclass
class Bag:
    """A user's object."""

    values: Any
    names: list[str]


def _sparse() -> torch.Tensor:
    with (
        torch.sparse.check_sparse_tensor_invariants()
    ):  # some torch versions also warn about the argument check_invariants=
        return torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,))


def batches() -> list[Any]:
    return [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(4, 3),
        torch.arange(12.0).reshape(4, 3).t(),
        torch.arange(1 << 20),
        np.arange(12),
        np.array(["a", None], dtype=object),
        {"a": torch.ones(2), "b": ["x", 1, 2.5, b"c"]},
        (torch.ones(2), [torch.zeros(2)]),
        Bag(torch.ones(3), ["u", "v"]),
        _sparse(),
        torch.tensor([1 + 2j]).conj(),
    ]


def test_equal_content_has_an_equal_fingerprint() -> None:
    found = [fingerprint(batch) for batch in batches()]
    assert found == [fingerprint(batch) for batch in batches()]
    assert len(set(found)) == len(found)


def test_changed_value_changes_the_fingerprint() -> None:
    batch = batches()[6]
    before = fingerprint(batch)
    batch["b"][1] = 2
    assert fingerprint(batch) != before


@pytest.mark.parametrize("batch", [None, object(), [], {}, torch.empty(0), torch.empty(2, device="meta")])
def test_empty_batch_has_no_fingerprint(batch: Any) -> None:
    assert fingerprint(batch) is None
