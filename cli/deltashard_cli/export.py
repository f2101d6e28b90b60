"""Export of checkpoints as a safetensors file or a torch state_dict."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from deltashard_checkpoint.errors import EnvironmentFault, UserError
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint

from deltashard_cli.directory import (
    Array,
    ExportResult,
    NamedArray,
    atomic_output,
    check_output,
    dense_tensors,
    non_tensor_blobs,
)
from deltashard_cli.output import Advance

if TYPE_CHECKING:
    import torch

_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def export_safetensors(
    checkpoint: OpenCheckpoint, out: Path, *, state: bool, force: bool, advance: Advance
) -> ExportResult:
    """Write tables and dense tensors into one safetensors file, with at most one table in memory.

    `state` adds optimizer-state fields as `{table}.{field}`. Raises `UserError` for a dtype that safetensors does not
    support, and the errors of `check_output`.
    """
    check_output(out, force=force)
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
        shapes += [
            (f"{schema.fqn}.{spec.name}", spec.dtype, spec.shape(schema.rows, schema.columns))
            for spec in (schema.fields if state else ())
        ]
    shapes += [(each.name, each.dtype, each.values.shape) for each in dense]
    for name, dtype, shape in shapes:
        if dtype not in _SAFETENSORS:
            raise UserError(
                f"safetensors does not support {dtype}",
                where=name,
                remedy="use `deltashard restore`, or export .pt",
            )
        length = int(np.prod(shape, dtype=np.int64)) * element_type.by_name(dtype).itemsize_bytes
        if name in header:
            raise UserError(f"two tensors have the name {name!r}", where=checkpoint.where)
        header[name] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _new_file(out) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for each in _arrays(checkpoint, dense, state=state, advance=advance):
            file.write(np.ascontiguousarray(each.values).data)
    return _exported(checkpoint, out, len(shapes), blobs, dense)


def export_torch(
    checkpoint: OpenCheckpoint, out: Path, *, state: bool, force: bool, advance: Advance
) -> ExportResult:
    """Write a state_dict {name: tensor} by `torch.save`, with all tensors in memory; `state` adds {table}.{field}.

    Raises `UserError` if torch is not installed, and the errors of `check_output`.
    """
    require_torch("export to .pt", "export to .safetensors, which needs no torch")
    import torch

    check_output(out, force=force)
    blobs = checkpoint.blobs(advance=advance)
    dense = list(dense_tensors(blobs))
    arrays = _arrays(checkpoint, dense, state=state, advance=advance)
    tensors = {each.name: torch_tensor(each.dtype, each.values) for each in arrays}
    with _new_file(out) as file:
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # raised by torch's zip writer when the disk is full
            raise EnvironmentFault(
                f"torch could not write the file: {str(error).splitlines()[0]}",
                where=str(out),
                remedy="free space on the disk",
            ) from error
    return _exported(checkpoint, out, len(tensors), blobs, dense)


def _arrays(
    checkpoint: OpenCheckpoint, dense: Iterable[NamedArray], *, state: bool, advance: Advance
) -> Iterator[NamedArray]:
    for table in checkpoint.tables(fields=state, advance=advance):
        schema = table.schema
        yield NamedArray(name=schema.fqn, dtype=schema.dtype, values=table.weights)
        for spec in schema.fields if state else ():
            yield NamedArray(
                name=f"{schema.fqn}.{spec.name}", dtype=spec.dtype, values=table.fields[spec.name]
            )
    yield from dense


def require_torch(what: str, instead: str) -> None:
    """Raise `UserError` if torch is not installed: `what` needs it, and the remedy offers `instead`."""
    try:
        import torch  # noqa: F401 - tests whether it is installed
    except ImportError as error:
        raise UserError(
            f"{what} needs torch, which is not installed",
            remedy=f"pip install 'deltashard[trainer]', or {instead}",
        ) from error


def torch_tensor(dtype: str, values: Array) -> torch.Tensor:
    """Return `values`, the bits of elements of type `dtype`, as a tensor; shares writable memory."""
    import torch

    target = getattr(torch, dtype)
    made = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    return made if made.dtype == target else made.view(target)


def _exported(
    checkpoint: OpenCheckpoint, out: Path, tensors: int, blobs: Iterable[str], dense: Iterable[NamedArray]
) -> ExportResult:
    return ExportResult.of(
        checkpoint, out, tensors=tensors, bytes=out.stat().st_size, skipped=non_tensor_blobs(blobs, dense)
    )


@contextmanager
def _new_file(out: Path) -> Iterator[BinaryIO]:
    with atomic_output(out) as place, place.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
