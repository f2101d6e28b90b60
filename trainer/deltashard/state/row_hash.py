"""Row hashes of live torch tensors on any device: the checkpoint package's kernels on the CPU, torch on a GPU.

Both compute h = sum_j w_j * x_j mod 2**64 over the 32-bit words of a row, with all sections of a row concatenated (see
`deltashard_checkpoint.codecs.row_hash`), and agree bit for bit. Hashes are returned as int64 since torch has no
unsigned arithmetic; two's complement wraps the same way.

On the CPU the rows of all tables are hashed together, in chunks on helper threads; the kernels release the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from deltashard_checkpoint.codecs import row_kernel
from torch import Tensor

from deltashard.state.kernel_thread import share

_CHUNK_BYTES = 4 << 20
_GPU_CHUNK_BYTES = 64 << 20


class Hashing:
    """Hashes of all rows of `sections`, as jobs for any threads; after all jobs `result` returns int64 [R].

    Sections are one or more strided tensors [R] or [R, D] of any dtype, with equal R. Sections on several devices are
    hashed there, and the sums are added on the first one's device.
    """

    def __init__(self, sections: Sequence[Tensor], seed: int) -> None:
        self.jobs: list[Callable[[], None]] = []
        self._home = sections[0].device
        self._parts: list[Callable[[], Tensor]] = []
        for i, (device, group) in enumerate(_by_device(sections).items()):
            if device.type == "cpu":
                self._on_cpu(group, seed + i)
            else:
                self._parts.append(partial(_on_device, group, seed + i, None))

    def result(self) -> Tensor:
        return _sum([part() for part in self._parts], self._home)

    def _on_cpu(self, sections: list[Tensor], seed: int) -> None:
        arrays = [row_bytes(s).numpy() for s in sections]
        n = len(arrays[0])
        out = np.zeros(n, np.uint64)

        def work(a: int, b: int) -> None:
            row_kernel.row_hashes([x[a:b] for x in arrays], seed, out=out[a:b])

        chunks = max(1, sum(x.nbytes for x in arrays) // _CHUNK_BYTES)
        edges = [n * i // chunks for i in range(chunks + 1)]
        self.jobs += [partial(work, a, b) for a, b in itertools.pairwise(edges) if b > a]
        self._parts.append(lambda: torch.from_numpy(out.view(np.int64)))


def row_hashes(sections: Sequence[Tensor], seed: int, *, rows: Tensor | None = None) -> Tensor:
    """Compute hashes as `Hashing` does: int64 [R], or [len(rows)] for int64 positions `rows` on any device."""
    if rows is None:
        hashing = Hashing(sections, seed)
        share(hashing.jobs)
        return hashing.result()
    parts = [
        (_some_on_cpu if device.type == "cpu" else _on_device)(group, seed + i, rows.to(device))
        for i, (device, group) in enumerate(_by_device(sections).items())
    ]
    return _sum(parts, sections[0].device)


def _by_device(sections: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for section in sections:
        found.setdefault(section.device, []).append(section.detach())
    return found


def _sum(parts: Sequence[Tensor], home: torch.device) -> Tensor:
    total = parts[0].to(home)
    for part in parts[1:]:
        total = total + part.to(home)
    return total


def layout(sections: Sequence[Tensor]) -> tuple[object, ...]:
    """A key that must be equal for hashes to be comparable: dtypes, widths and devices ([R] equals [R, 1])."""
    return tuple((s.dtype, s.shape[0], s.numel(), s.device) for s in sections)


def _some_on_cpu(sections: list[Tensor], seed: int, rows: Tensor) -> Tensor:
    arrays = [row_bytes(s).numpy() for s in sections]
    positions = np.ascontiguousarray(rows.numpy(), np.int64)
    return torch.from_numpy(row_kernel.row_hashes(arrays, seed, rows=positions).view(np.int64))


def _on_device(sections: list[Tensor], seed: int, rows: Tensor | None) -> Tensor:
    device = sections[0].device
    n = sections[0].shape[0]
    count = n if rows is None else rows.numel()
    raw = [row_bytes(s) for s in sections]
    words = [-(-r.shape[1] // 4) for r in raw]
    weights = torch.from_numpy(row_kernel.hash_weights(seed, sum(words)).astype(np.int64)).to(device)
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
