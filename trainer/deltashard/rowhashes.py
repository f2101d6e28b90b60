"""Row hashes of live torch tensors, wherever they are: the checkpoint package's kernels on the CPU, torch on a GPU.

Both compute h = sum_j w_j * x_j mod 2**64 over the 32-bit words of a row, all sections of a row counted as one long
row (see `deltashard_checkpoint.codecs.rowhashes`), and agree bit for bit. Hashes are returned as int64 since torch has
no unsigned arithmetic; two's complement wraps the same way.

On the CPU the rows of large tables are split over as many threads as torch uses; the kernels hold no interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from deltashard_checkpoint.codecs import rowhashes
from torch import Tensor

from deltashard.threads import split

_SPLIT_BYTES = 8 << 20
_GPU_CHUNK_BYTES = 64 << 20


def row_hashes(sections: Sequence[Tensor], seed: int, *, rows: Tensor | None = None) -> Tensor:
    """Hashes over `sections` together: int64 [R], or [len(rows)] for int64 positions `rows`.

    Args:
        sections: strided tensors [R] or [R, D] of any type, all of the same R; at least one. Sections on several
            devices are hashed where they are and the sums added on the first one's device.
        seed: chooses the weights.
        rows: int64 [n] on any device.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for section in sections:
        by_device.setdefault(section.device, []).append(section.detach())
    home = sections[0].device
    total: Tensor | None = None
    for i, (device, group) in enumerate(by_device.items()):
        chosen = None if rows is None else rows.to(device)
        part = (_on_cpu if device.type == "cpu" else _on_device)(group, seed + i, chosen).to(home)
        total = part if total is None else total + part
    assert total is not None
    return total


def layout(sections: Sequence[Tensor]) -> tuple[object, ...]:
    """What must be equal for two sets of hashes to compare: types and widths of the sections ([R] is [R, 1])."""
    return tuple((s.dtype, s.shape[0], s.numel()) for s in sections)


def _on_cpu(sections: list[Tensor], seed: int, rows: Tensor | None) -> Tensor:
    arrays = [row_bytes(s).numpy() for s in sections]
    if rows is not None:
        positions = np.ascontiguousarray(rows.numpy(), np.int64)
        return torch.from_numpy(rowhashes.row_hashes(arrays, seed, rows=positions).view(np.int64))
    n = len(arrays[0])
    out = np.zeros(n, np.uint64)

    def work(a: int, b: int) -> None:
        rowhashes.row_hashes([x[a:b] for x in arrays], seed, out=out[a:b])

    split(n, sum(a.nbytes for a in arrays) // _SPLIT_BYTES, work)
    return torch.from_numpy(out.view(np.int64))


def _on_device(sections: list[Tensor], seed: int, rows: Tensor | None) -> Tensor:
    device = sections[0].device
    n = sections[0].shape[0]
    count = n if rows is None else rows.numel()
    raw = [row_bytes(s) for s in sections]
    words = [-(-r.shape[1] // 4) for r in raw]
    weights = torch.from_numpy(rowhashes.hash_weights(seed, sum(words)).astype(np.int64)).to(device)
    out = torch.zeros(count, dtype=torch.int64, device=device)
    # int64 products of a chunk take twice the bytes of its words.
    step = max(1, _GPU_CHUNK_BYTES // max(4 * max(words), 1))
    at = 0
    for section, width in zip(raw, words, strict=True):
        w = weights[at : at + width]
        at += width
        for a in range(0, count, step):
            b = min(a + step, count)
            piece = section[a:b] if rows is None else section[rows[a:b]]
            if piece.shape[1] != 4 * width or piece.storage_offset() % 4 or not piece.is_contiguous():
                padded = torch.zeros((b - a, 4 * width), dtype=torch.uint8, device=device)
                padded[:, : piece.shape[1]] = piece
                piece = padded
            values = piece.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
            out[a:b] += (values * w).sum(dim=1)
    return out


def row_bytes(section: Tensor) -> Tensor:
    """The section's rows as uint8 [R, bytes of a row], without a copy when it is contiguous."""
    section = section.contiguous()
    return section.view(section.shape[0], -1).view(torch.uint8)
