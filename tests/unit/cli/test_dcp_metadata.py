"""A DCP directory's `.metadata`: torch's own are read, and nothing else; no byte of it is run."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deltashard_cli.dcp.metadata import METADATA, NotReadable, StoredObject, StoredTensor, read_contents
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SAVED = {
    "model": {"emb.weight": torch.arange(12.0).view(4, 3), "n": torch.tensor(7), "none": torch.zeros(0, 2)},
    "optimizer": {"param_groups": [{"lr": 0.5, "params": ["emb.weight"]}]},
    "epoch": 3,
}
FLAG = "DELTASHARD_TEST_RAN"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory that dcp.save wrote."""
    dcp.save(SAVED, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def metadata_of(directory: Path) -> Metadata:
    return pickle.loads((directory / METADATA).read_bytes())


def put(directory: Path, metadata: Any) -> None:
    (directory / METADATA).write_bytes(pickle.dumps(metadata))


def test_what_dcp_writes_is_read_with_its_paths(saved: Path) -> None:
    found = read_contents(saved).values
    assert list(found) == [
        ("model", "emb.weight"),
        ("model", "n"),
        ("model", "none"),
        ("optimizer", "param_groups", 0, "lr"),
        ("optimizer", "param_groups", 0, "params"),
        ("epoch",),
    ]
    table = found["model", "emb.weight"]
    assert isinstance(table, StoredTensor)
    assert (table.name, table.dtype, table.shape) == ("model.emb.weight", "float32", (4, 3))
    assert [(piece.offsets, piece.sizes) for piece in table.pieces] == [((0, 0), (4, 3))]
    scalar, empty = found["model", "n"], found["model", "none"]
    assert isinstance(scalar, StoredTensor)
    assert isinstance(empty, StoredTensor)
    assert (scalar.shape, len(scalar.pieces)) == ((), 1)
    assert (empty.shape, empty.pieces) == ((0, 2), ())
    assert isinstance(found["epoch",], StoredObject)


def test_every_type_of_tensor_is_named(tmp_path: Path) -> None:
    """As torch pickles it."""
    types = [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.bool,
        torch.uint16,
        torch.complex64,
    ]
    dcp.save({str(each): torch.zeros(2, dtype=each) for each in types}, checkpoint_id=tmp_path / "saved")
    found = read_contents(tmp_path / "saved").values
    assert [f"torch.{value.dtype}" for value in found.values() if isinstance(value, StoredTensor)] == [
        str(each) for each in types
    ]


class Runs:
    """Pickled, it runs something."""

    def __init__(self, call: Callable[..., Any], *given: Any) -> None:
        self._call, self._given = call, given

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call, self._given


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (Runs(os.system, f"export {FLAG}=1"), "posix.system"),
        (Runs(eval, f"__import__('os').environ.__setitem__('{FLAG}', '1')"), "builtins.eval"),
        (Runs(exec, f"import os; os.environ['{FLAG}'] = '1'"), "builtins.exec"),
        (Runs(getattr, "", "join"), "builtins.getattr"),
        (torch.load, "torch.serialization.load"),
        (torch.device("cpu"), "torch.device"),
        (torch.zeros(2), "torch._utils._rebuild_tensor_v2"),
        (
            ChunkStorageMetadata.__init__,
            "torch.distributed.checkpoint.metadata.ChunkStorageMetadata.__init__",
        ),
        (pickle.Unpickler, "_pickle.Unpickler"),
        (
            torch.distributed.checkpoint.filesystem.FileSystem,
            "torch.distributed.checkpoint.filesystem.FileSystem",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pickle_that_names_anything_else_is_refused_by_that_name(
    saved: Path, hostile: Any, said: str
) -> None:
    """At the root, and deep within a whole one; nothing is called."""
    metadata = metadata_of(saved)
    metadata.planner_data = {"more": [hostile]}
    for each in (hostile, metadata):
        put(saved, each)
        with pytest.raises(NotReadable, match=f"the pickle names {said}"):
            read_contents(saved)
    assert FLAG not in os.environ


def test_a_pickle_that_sets_attributes_of_classes_changes_none(saved: Path) -> None:
    """BUILD on the class itself, with a dict and with slots: what stands in for torch's classes takes neither."""
    known = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for state in (b"}S'kind'\nS'changed'\ns", b"N}S'kind'\nS'changed'\ns\x86"):
        (saved / METADATA).write_bytes(b"\x80\x02" + known + state + b"b.")
        with pytest.raises(NotReadable, match="TypeError"):
            read_contents(saved)
    for builtin in (b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"ctorch\nfloat32\n"):
        (saved / METADATA).write_bytes(b"\x80\x02" + builtin + b"N}S'x'\nS'y'\ns\x86b.")
        with pytest.raises(NotReadable, match="it cannot be read"):
            read_contents(saved)
    assert Metadata.__name__ == "Metadata"
    assert not hasattr(Metadata, "kind")
    dcp.save(SAVED, checkpoint_id=saved / "more")
    assert len(read_contents(saved / "more").values) == 6


def test_rubbish_is_refused(saved: Path) -> None:
    """Cut short anywhere, or with a bit flipped: it is read, or refused, and never anything else."""
    whole = (saved / METADATA).read_bytes()
    for stop in range(0, len(whole), 97):
        (saved / METADATA).write_bytes(whole[:stop])
        with pytest.raises(NotReadable):
            read_contents(saved)
    for at in range(0, len(whole), 31):
        (saved / METADATA).write_bytes(whole[:at] + bytes([whole[at] ^ 0x04]) + whole[at + 1 :])
        with contextlib.suppress(NotReadable):
            read_contents(saved)
    (saved / METADATA).write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(NotReadable, match="no Metadata"):
        read_contents(saved)


def damage_path(metadata: Metadata, name: str) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = name


def damage_chunk(metadata: Metadata, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    chunk = metadata.state_dict_metadata["model.emb.weight"].chunks[0]
    chunk.offsets, chunk.sizes = torch.Size(offsets), torch.Size(sizes)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda m: damage_path(m, "../saved/__0_0.distcp"), "no file of this directory"),
        (lambda m: damage_path(m, "/etc/passwd"), "no file of this directory"),
        (lambda m: damage_path(m, ".."), "no file of this directory"),
        (lambda m: damage_path(m, "__9_0.distcp"), "does not exist"),
        (lambda m: damage_chunk(m, (0, 0), (3, 3)), "is not whole"),
        (lambda m: damage_chunk(m, (1, 0), (4, 3)), "not within it"),
        (lambda m: damage_chunk(m, (0,), (12,)), "not within it"),
        (lambda m: m.state_dict_metadata["model.emb.weight"].chunks.clear(), "is not whole"),
        (lambda m: m.state_dict_metadata.update({"x": BytesStorageMetadata()}), "nothing says where x lies"),
        (lambda m: m.state_dict_metadata.update({7: BytesStorageMetadata()}), "no text"),
        (lambda m: m.planner_data.update({"epoch": ("model", "n")}), "two values at model.n"),
        (lambda m: m.planner_data.update({"epoch": ()}), "a path that is none"),
        (lambda m: m.storage_data.clear(), "nothing says where"),
        (
            lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", ["zstd"]),
            "was transformed",
        ),
        (lambda m: setattr(next(iter(m.storage_data.values())), "offset", -1), "has no place"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "length", 1 << 40), "is too short"),
        (lambda m: setattr(m, "state_dict_metadata", []), "is no dict"),
    ],
)
def test_what_is_wrong_in_a_whole_pickle_is_said(
    saved: Path, damage: Callable[[Metadata], Any], said: str
) -> None:
    metadata = metadata_of(saved)
    damage(metadata)
    put(saved, metadata)
    with pytest.raises(NotReadable, match=said):
        read_contents(saved)


def test_pieces_that_overlap_are_refused(saved: Path) -> None:
    """Also where they have together as many elements as the tensor."""
    metadata = metadata_of(saved)
    held = metadata.state_dict_metadata["model.emb.weight"]
    index, info = next(
        (index, info) for index, info in metadata.storage_data.items() if index.fqn == "model.emb.weight"
    )
    held.chunks = [
        ChunkStorageMetadata(offsets=torch.Size((row, 0)), sizes=torch.Size((2, 3))) for row in (0, 1)
    ]
    for row in (0, 1):
        metadata.storage_data[type(index)(index.fqn, (row, 0))] = info
    put(saved, metadata)
    with pytest.raises(NotReadable, match=r"two pieces of model\.emb\.weight overlap"):
        read_contents(saved)


def test_a_directory_without_metadata_says_what_is_meant(tmp_path: Path) -> None:
    with pytest.raises(NotReadable, match=r"there is no \.metadata"):
        read_contents(tmp_path)
