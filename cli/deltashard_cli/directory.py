"""Arrays and tensors of a checkpoint, and `restore` into a directory of .npy files.

NumPy has no bfloat16: its bits are stored as uint16, and the manifest records the element type.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format import element_type, typed_tree
from deltashard_checkpoint.restore.checkpoint_reader import TableArrays
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint

from deltashard_cli.output import Advance

Array = npt.NDArray[np.generic]
DENSE = "dense/"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedArray:
    """An array and the name of its element type; `values` holds the bits (bfloat16 as uint16)."""

    name: str
    dtype: str
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """Path, origin and size of an export."""

    path: str
    seq: int
    step: int
    tables: int
    tensors: int
    bytes: int
    blobs: int = 0
    skipped: tuple[str, ...] = ()
    """Dense values that are not plain tensors (for example sparse ones) and cannot be stored in the file."""
    left_out: tuple[str, ...] = ()
    """Other requested values that cannot be stored in the file, each with the reason."""

    @classmethod
    def of(cls, checkpoint: OpenCheckpoint, out: Path, **found: Any) -> ExportResult:
        entry = checkpoint.entry
        return cls(path=str(out), seq=entry.seq, step=entry.step, tables=len(entry.tables), **found)


def tensor_of(tree: Any) -> typed_tree.Tensor | None:
    """Return a blob's tree as a tensor, with the accelerator tag removed; None for any other tree."""
    while isinstance(tree, typed_tree.Tagged) and tree.tag == "torch.accelerator":
        tree = tree.value
    if isinstance(tree, np.ndarray):
        return typed_tree.Tensor(
            dtype=tree.dtype.name, shape=tree.shape, data=np.ascontiguousarray(tree).data
        )
    return tree if isinstance(tree, typed_tree.Tensor) else None


def array_of(tensor: typed_tree.Tensor) -> Array:
    return np.frombuffer(tensor.data, element_type.by_name(tensor.dtype).carrier).reshape(tensor.shape)


def dense_tensors(blobs: Mapping[str, memoryview]) -> Iterator[NamedArray]:
    """Yield parameters and buffers that are not tables, under their names in the model."""
    for name, blob in sorted(blobs.items()):
        if name.startswith(DENSE) and (tensor := tensor_of(typed_tree.decode(blob))) is not None:
            yield NamedArray(name=name[len(DENSE) :], dtype=tensor.dtype, values=array_of(tensor))


def restore_directory(checkpoint: OpenCheckpoint, out: Path, *, advance: Advance) -> ExportResult:
    """Write tables, their optimizer state and all blobs into the new directory `out`, with a manifest.json.

    Files: `tables/{fqn}/weight.npy`, `tables/{fqn}/{field}.npy`, `dense/{name}.npy` and `blobs/{name}.tree` (a typed
    tree as stored). Raises the errors of `check_output`.
    """
    check_output(out)
    entry = checkpoint.entry
    manifest: dict[str, Any] = {
        "format": 1,
        "run": checkpoint.state.run,
        "seq": entry.seq,
        "step": entry.step,
        "tables": {},
        "dense": {},
        "blobs": {},
    }
    arrays = 0
    with atomic_output(out) as place:
        for table in checkpoint.tables(advance=advance):
            schema = table.schema
            directory = Path("tables") / _file_name(schema.fqn)
            dtype_of = {spec.name: spec.dtype for spec in schema.fields}
            manifest["tables"][schema.fqn] = {
                "weight": _write_array(place, directory / "weight", schema.dtype, table.weights),
                "fields": {
                    name: _write_array(place, directory / _file_name(name), dtype_of[name], values)
                    for name, values in table.fields.items()
                },
            }
            arrays += 1 + len(table.fields)
        blobs = checkpoint.blobs(advance=advance)
        for found in dense_tensors(blobs):
            path = Path("dense") / _file_name(found.name)
            manifest["dense"][found.name] = _write_array(place, path, found.dtype, found.values)
            arrays += 1
        for name, blob in sorted(blobs.items()):
            if name.removeprefix(DENSE) not in manifest["dense"]:
                path = Path("blobs") / f"{_file_name(name)}.tree"
                _new_file(place / path).write_bytes(blob)
                manifest["blobs"][name] = {"file": str(path), "bytes": len(blob)}
        _new_file(place / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        written = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return ExportResult.of(checkpoint, out, tensors=arrays, blobs=len(manifest["blobs"]), bytes=written)


def non_tensor_blobs(blobs: Iterable[str], dense: Iterable[NamedArray]) -> tuple[str, ...]:
    tensors = {DENSE + each.name for each in dense}
    return tuple(sorted(name for name in blobs if name.startswith(DENSE) and name not in tensors))


def _file_name(name: str) -> str:
    return quote(name, safe="._-+ ").replace("..", "%2E%2E")


def _new_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write_array(place: Path, stem: Path, dtype: str, values: Array) -> dict[str, Any]:
    path = stem.with_name(f"{stem.name}.npy")
    np.save(_new_file(place / path), np.ascontiguousarray(values), allow_pickle=False)
    return {"file": str(path), "dtype": dtype, "shape": list(values.shape)}


def check_output(out: Path, *, force: bool | None = None) -> None:
    """Raise `UserError` if `out` cannot be created, or exists and `force` is not set.

    `force` is the command's --force; None for commands without that option.
    """
    if out.exists() and not force:
        remedy = "choose a new path" if force is None else "choose a new path, or use --force"
        raise UserError("the output already exists", where=str(out), remedy=remedy)
    above = next(each for each in out.absolute().parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError("the directory is not writable", where=str(out), remedy="choose another path")


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yield a temporary path next to `out`, which is renamed to `out` on success and removed on failure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    place = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        yield place
        place.replace(out)
    finally:
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)


def values_of(table: TableArrays, name: str | None) -> tuple[str, Array]:
    """Return (dtype, values) of a table's weights (`name` None) or of one field."""
    if name is None:
        return table.schema.dtype, table.weights
    return next(spec.dtype for spec in table.schema.fields if spec.name == name), table.fields[name]
