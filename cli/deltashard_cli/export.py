"""Checkpoints as files other tools read: a directory of arrays, a safetensors file, a torch state_dict.

A result appears whole or not at all: it is written beside its place and renamed. numpy and .npy know no bfloat16: there
its bits are uint16, and the manifest says so; safetensors and torch have it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.errors import EnvironmentFault, UserError
from deltashard_checkpoint.format import element_type, typed_tree
from deltashard_checkpoint.restore.checkpoint_reader import TableArrays
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint

from deltashard_cli.output import Advance

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.generic]
DENSE = "dense/"

_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An array with the name of its element type; `values` holds the bits (bfloat16 as uint16)."""

    name: str
    dtype: str
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written where."""

    path: str
    seq: int
    step: int
    tables: int
    tensors: int
    blobs: int
    bytes: int
    skipped: tuple[str, ...] = ()
    """Dense values that are no plain tensors (sparse ones) and have no place in the file."""
    left_out: tuple[str, ...] = ()
    """What else was asked for and has no place there, each with the reason."""


def tensor_of(tree: Any) -> typed_tree.Tensor | None:
    """The tensor that a blob's tree is, wherever it lived; None for any other tree."""
    while isinstance(tree, typed_tree.Tagged) and tree.tag == "torch.accelerator":
        tree = tree.value
    if isinstance(tree, np.ndarray):
        return typed_tree.Tensor(
            dtype=tree.dtype.name, shape=tree.shape, data=np.ascontiguousarray(tree).data
        )
    return tree if isinstance(tree, typed_tree.Tensor) else None


def array_of(tensor: typed_tree.Tensor) -> Array:
    """A tensor's bits as an array of its shape."""
    return np.frombuffer(tensor.data, element_type.by_name(tensor.dtype).carrier).reshape(tensor.shape)


def dense_tensors(blobs: Mapping[str, memoryview]) -> Iterator[Named]:
    """Parameters and buffers that are no tables, under their names in the model."""
    for name, blob in sorted(blobs.items()):
        if name.startswith(DENSE) and (tensor := tensor_of(typed_tree.decode(blob))) is not None:
            yield Named(name=name[len(DENSE) :], dtype=tensor.dtype, values=array_of(tensor))


def restore_directory(checkpoint: OpenCheckpoint, out: Path, *, raw: bool, advance: Advance) -> Written:
    """Write tables, their optimizer state and all blobs under the new directory `out`, with manifest.json.

    `tables/{fqn}/weight.npy`, `tables/{fqn}/{field}.npy`, `dense/{name}.npy` and `blobs/{name}.tree` (a typed tree as
    stored); with `raw` arrays are bare little-endian bytes in `.bin`. Raises `UserError` when `out` exists.
    """
    check_new_directory(out)
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
    with beside(out) as place:
        for table in checkpoint.tables(advance=advance):
            schema = table.schema
            directory = Path("tables") / _file_name(schema.fqn)
            dtype_of = {spec.name: spec.dtype for spec in schema.fields}
            manifest["tables"][schema.fqn] = {
                "weight": _write_array(place, directory / "weight", schema.dtype, table.weights, raw=raw),
                "fields": {
                    name: _write_array(place, directory / _file_name(name), dtype_of[name], values, raw=raw)
                    for name, values in table.fields.items()
                },
            }
            arrays += 1 + len(table.fields)
        blobs = checkpoint.blobs(advance=advance)
        for found in dense_tensors(blobs):
            path = Path("dense") / _file_name(found.name)
            manifest["dense"][found.name] = _write_array(place, path, found.dtype, found.values, raw=raw)
            arrays += 1
        for name, blob in sorted(blobs.items()):
            if name.removeprefix(DENSE) not in manifest["dense"]:
                path = Path("blobs") / f"{_file_name(name)}.tree"
                _new_file(place / path).write_bytes(blob)
                manifest["blobs"][name] = {"file": str(path), "bytes": len(blob)}
        (place / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        written = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return Written(
        path=str(out),
        seq=entry.seq,
        step=entry.step,
        tables=len(manifest["tables"]),
        tensors=arrays,
        blobs=len(manifest["blobs"]),
        bytes=written,
    )


def export_safetensors(
    checkpoint: OpenCheckpoint, out: Path, *, state: bool, force: bool, advance: Advance
) -> Written:
    """Weights of tables and dense tensors in one safetensors file, streamed: no more than one table in memory.

    `state` adds optimizer-state fields as `{table}.{field}`. Raises `UserError` for a dtype that the format
    has not, and what `check_place` raises.
    """
    check_place(out, force=force)
    entry = checkpoint.entry
    blobs = checkpoint.blobs(advance=advance)
    dense = list(dense_tensors(blobs))
    header: dict[str, Any] = {
        "__metadata__": {
            "run": checkpoint.state.run,
            "seq": str(entry.seq),
            "step": str(entry.step),
            "format": "pt",
        }
    }
    offset = 0
    shapes: list[tuple[str, str, tuple[int, ...]]] = []
    for schema in entry.tables:
        shapes.append((schema.fqn, schema.dtype, (schema.rows, schema.columns)))
        for spec in schema.fields if state else ():
            columns = (schema.columns,) if spec.kind == "pointwise" else ()
            shapes.append((f"{schema.fqn}.{spec.name}", spec.dtype, (schema.rows, *columns)))
    shapes += [(each.name, each.dtype, each.values.shape) for each in dense]
    for name, dtype, shape in shapes:
        if dtype not in _SAFETENSORS:
            raise UserError(
                f"safetensors has no {dtype}", where=name, remedy="use `deltashard restore`, or export .pt"
            )
        length = int(np.prod(shape, dtype=np.int64)) * element_type.by_name(dtype).itemsize_bytes
        if name in header:
            raise UserError(f"two tensors are called {name!r}", where=checkpoint.where)
        header[name] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _replacing(out, force=force) as place, place.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for table in checkpoint.tables(fields=state, advance=advance):
            file.write(np.ascontiguousarray(table.weights).data)
            for spec in table.schema.fields if state else ():
                file.write(np.ascontiguousarray(table.fields[spec.name]).data)
        for each in dense:
            file.write(np.ascontiguousarray(each.values).tobytes())
    return _exported(checkpoint, out, len(shapes), blobs, dense)


def export_torch(
    checkpoint: OpenCheckpoint, out: Path, *, state: bool, force: bool, advance: Advance
) -> Written:
    """`torch.save` of a state_dict {name: tensor}; `state` adds {table}.{field}. All of it is in memory at once.

    Raises `UserError` when torch is not installed, and what `check_place` raises.
    """
    require_torch("export to .pt", "export to .safetensors, which needs nothing")
    import torch

    check_place(out, force=force)
    tensors: dict[str, torch.Tensor] = {}
    for table in checkpoint.tables(fields=state, advance=advance):
        tensors[table.schema.fqn] = torch_tensor(table.schema.dtype, table.weights)
        for spec in table.schema.fields if state else ():
            tensors[f"{table.schema.fqn}.{spec.name}"] = torch_tensor(spec.dtype, table.fields[spec.name])
    blobs = checkpoint.blobs(advance=advance)
    dense = list(dense_tensors(blobs))
    tensors |= {each.name: torch_tensor(each.dtype, each.values) for each in dense}
    with _replacing(out, force=force) as place, place.open("wb") as file:
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # so its writer says that the disk is full
            raise EnvironmentFault(
                f"torch could not write it: {str(error).splitlines()[0]}",
                where=str(out),
                remedy="look for room on the disk",
            ) from error
    return _exported(checkpoint, out, len(tensors), blobs, dense)


def require_torch(what: str, instead: str) -> None:
    """Raises `UserError` where torch is not installed: `what` needs it, and `instead` is the other way."""
    try:
        import torch  # noqa: F401 - whether it is there
    except ImportError as error:
        raise UserError(
            f"{what} needs torch, which is not installed",
            remedy=f"pip install 'deltashard[trainer]', or {instead}",
        ) from error


def torch_tensor(dtype: str, values: Array) -> torch.Tensor:
    """`values`, the bits of elements of type `dtype`, as a tensor; of the same memory where that may be written."""
    import torch

    target = getattr(torch, dtype)
    made = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    return made if made.dtype == target else made.view(target)


def _exported(
    checkpoint: OpenCheckpoint, out: Path, tensors: int, blobs: Iterable[str], dense: Iterable[Named]
) -> Written:
    return Written(
        path=str(out),
        seq=checkpoint.entry.seq,
        step=checkpoint.entry.step,
        tables=len(checkpoint.entry.tables),
        tensors=tensors,
        blobs=0,
        bytes=out.stat().st_size,
        skipped=no_tensors(blobs, dense),
    )


def no_tensors(blobs: Iterable[str], dense: Iterable[Named]) -> tuple[str, ...]:
    """Names of the dense blobs that are not among the tensors."""
    tensors = {DENSE + each.name for each in dense}
    return tuple(sorted(name for name in blobs if name.startswith(DENSE) and name not in tensors))


def _file_name(name: str) -> str:
    """A name as one path segment, the same for the same name."""
    return quote(name, safe="._-+ ").replace("..", "%2E%2E")


def _new_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write_array(place: Path, stem: Path, dtype: str, values: Array, *, raw: bool) -> dict[str, Any]:
    path = stem.with_name(stem.name + (".bin" if raw else ".npy"))
    whole = np.ascontiguousarray(values)
    if raw:
        _new_file(place / path).write_bytes(whole.data)
    else:
        np.save(_new_file(place / path), whole, allow_pickle=False)
    return {"file": str(path), "dtype": dtype, "shape": list(values.shape)}


def check_new_directory(out: Path) -> None:
    """Raises `UserError` where `out` exists or cannot be made; missing directories above it are."""
    if out.exists():
        raise UserError("the output exists already", where=str(out), remedy="name a new directory")
    above = next(each for each in out.absolute().parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError("no directory can be made there", where=str(out), remedy="name another place")


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` when all went well, and goes when not."""
    place = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    place.mkdir(parents=True)
    try:
        yield place
        place.rename(out)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def check_place(out: Path, *, force: bool) -> None:
    """Raises `UserError` for an existing file without `force`, and where no file can be made; reads nothing."""
    if out.exists() and not force:
        raise UserError("the output exists already", where=str(out), remedy="name a new file, or say --force")
    if not out.parent.is_dir():
        raise UserError("the output's directory does not exist", where=str(out), remedy="make it first")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(
            "no file may be written there", where=str(out), remedy="choose a directory of your own"
        )


@contextmanager
def _replacing(out: Path, *, force: bool) -> Iterator[Path]:
    """A file beside `out` that takes its place when all went well."""
    check_place(out, force=force)
    place = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        yield place
        with place.open("rb") as file:
            os.fsync(file.fileno())
        place.replace(out)
    finally:
        place.unlink(missing_ok=True)


def values_of(table: TableArrays, name: str | None) -> tuple[str, Array]:
    """(dtype, values) of a table's weights (None) or of one field."""
    if name is None:
        return table.schema.dtype, table.weights
    return next(spec.dtype for spec in table.schema.fields if spec.name == name), table.fields[name]
