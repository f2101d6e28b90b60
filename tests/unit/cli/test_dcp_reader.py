"""DCP directories are read as torch reads them; damaged or incomplete directories are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deltashard_cli.dcp.reader import METADATA, NotReadable, read_contents
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SAVED = {
    "model": {"emb.weight": torch.arange(12.0).view(4, 3), "n": torch.tensor(7), "none": torch.zeros(0, 2)},
    "optimizer": {"param_groups": [{"lr": 0.5, "params": ["emb.weight"]}]},
    "epoch": 3,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(SAVED, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def test_truncated_or_foreign_metadata_is_refused(saved: Path) -> None:
    whole = (saved / METADATA).read_bytes()
    for stop in range(0, len(whole), 97):
        (saved / METADATA).write_bytes(whole[:stop])
        with pytest.raises(NotReadable, match="unreadable metadata"):
            read_contents(saved)
    (saved / METADATA).write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(NotReadable, match="unreadable metadata"):
        read_contents(saved)


def damage_place(metadata: Metadata, **changes: Any) -> None:
    for info in metadata.storage_data.values():
        for name, value in changes.items():
            setattr(info, name, value)


def damage_chunk(metadata: Metadata, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    chunk = metadata.state_dict_metadata["model.emb.weight"].chunks[0]
    (index,) = [each for each in metadata.storage_data if each.fqn == "model.emb.weight"]
    metadata.storage_data[type(index)(index.fqn, offsets)] = metadata.storage_data.pop(index)
    chunk.offsets, chunk.sizes = torch.Size(offsets), torch.Size(sizes)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda m: damage_place(m, relative_path="__9_0.distcp"), "does not exist"),
        (lambda m: damage_place(m, length=1 << 40), "is too short"),
        (lambda m: damage_place(m, transform_descriptors=["zstd"]), "was transformed"),
        (lambda m: damage_chunk(m, (0, 0), (3, 3)), "is incomplete"),
        (lambda m: damage_chunk(m, (1, 0), (4, 3)), "is incomplete"),
        (lambda m: damage_chunk(m, (-1, 0), (4, 3)), "is incomplete"),
        (lambda m: m.state_dict_metadata["model.emb.weight"].chunks.clear(), "is incomplete"),
        (
            lambda m: m.state_dict_metadata.update({"x": BytesStorageMetadata()}),
            "the location of x is missing",
        ),
        (lambda m: m.storage_data.clear(), "the location of"),
        (lambda m: setattr(m, "state_dict_metadata", []), "unreadable metadata"),
    ],
)
def test_incomplete_checkpoint_is_refused(saved: Path, damage: Callable[[Metadata], Any], what: str) -> None:
    metadata = pickle.loads((saved / METADATA).read_bytes())
    damage(metadata)
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(NotReadable, match=what):
        read_contents(saved)


@pytest.mark.parametrize("second", [(0, 0), (1, 0), (1, 1)])
def test_overlapping_pieces_are_refused(saved: Path, second: tuple[int, int]) -> None:
    """Even if the element counts match: the uncovered elements would be read as zeros."""
    metadata = pickle.loads((saved / METADATA).read_bytes())
    held = metadata.state_dict_metadata["model.emb.weight"]
    index, info = next(item for item in metadata.storage_data.items() if item[0].fqn == "model.emb.weight")
    sizes = {(0, 0): ((2, 3), (2, 3)), (1, 0): ((2, 3), (2, 3)), (1, 1): ((4, 2), (2, 2))}[second]
    held.chunks = [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(size))
        for offsets, size in zip([(0, 0), second], sizes, strict=True)
    ]
    for offsets in ((0, 0), second):
        metadata.storage_data[type(index)(index.fqn, offsets)] = info
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(NotReadable, match=r"model\.emb\.weight is incomplete: two of its pieces overlap"):
        read_contents(saved)


def test_directory_without_metadata_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotReadable, match=r"\.metadata is missing"):
        read_contents(tmp_path)
