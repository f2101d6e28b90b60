"""Compares the codecs with torch on one thread, with speed and error from the same run.

GB/s are fp32 bytes per second of CPU time, the best of many turns. Both sides alternate, so that other load on the
machine affects both.
"""

from __future__ import annotations

from collections.abc import Callable

import codecs_reference as reference
import numpy as np
import torch
from deltashard_checkpoint.codecs import kernel_choice
from deltashard_checkpoint.codecs.decoder import decode_scatter
from deltashard_checkpoint.codecs.encoding import section_bytes
from deltashard_checkpoint.codecs.quantizer import DEFAULT_SEARCH, PLAIN, Search, encode_rows
from deltashard_checkpoint.codecs.row_id import decode_ids, encode_ids
from deltashard_checkpoint.codecs.row_kernel import row_hashes
from deltashard_checkpoint.vocabulary import ENCODINGS
from measuring import best_cpu_s

TORCH = {"q8": "byte", "q4": "4bit", "q2": "2bit"}
COLUMNS = 64
FRAME_ROWS = 28_000  # 7 MiB of fp32, a frame's worth
OPTIMIZED_ROWS = 2_000  # torch's search is slow; this many rows suffice for its speed and error
GREEDY_25 = Search(kind="greedy", bins=25, ratio=0.6)
GREEDY_200 = Search(kind="greedy", bins=200, ratio=0.16)


def rates(seconds: float, work: dict[str, tuple[int, Callable[[], object]]]) -> dict[str, float]:
    best = best_cpu_s(seconds, {name: call for name, (_, call) in work.items()})
    return {name: size / best[name] / 1e9 for name, (size, _) in work.items()}


def encoder(encoding: str, x: np.ndarray, search: Search) -> Callable[[], object]:
    buffers = [
        np.empty(size, np.uint8)
        for size in section_bytes(ENCODINGS[encoding], min(FRAME_ROWS, len(x)), x.shape[1])
    ]

    def encode() -> None:
        for start in range(0, len(x), FRAME_ROWS):
            encode_rows(ENCODINGS[encoding], x[start : start + FRAME_ROWS], *buffers, search=search)

    return encode


def aligned(x: np.ndarray) -> np.ndarray:
    """Return a copy aligned to 64 bytes, as arena blocks and torch's tensors are."""
    tensor = torch.empty(x.shape)
    tensor.numpy()[:] = x
    return tensor.numpy()


def row(
    what: str,
    ours: float,
    unit: str,
    *,
    peer: str = "",
    theirs: float | None = None,
    bar: float | None = None,
) -> dict:
    """Return a row of the table; the ratio is how many times better ours is (less error, more GB/s)."""
    ratio = None if theirs is None else theirs / ours if unit == "L2" else ours / theirs
    met = None if bar is None or ratio is None else bool(ratio >= bar)
    return {"what": what, "ours": ours, "unit": unit, "peer": peer, "theirs": theirs, "ratio": ratio,
            "bar": bar, "met": met}  # fmt: skip


def plain_and_decode(quick: bool) -> list[dict]:
    """Compare plain quantization with prepack (same bits), and fused decode and scatter with unpack (and scatter)."""
    n = 2 * FRAME_ROWS if quick else 8 * FRAME_ROWS
    x = aligned(reference.rows_like("gaussian", n, COLUMNS))
    tensor = torch.from_numpy(x)
    table = torch.zeros(2 * n, COLUMNS)
    touched = np.sort(np.random.default_rng(0).choice(2 * n, n, replace=False)).astype(np.int64)
    out = []
    for encoding, name in TORCH.items():
        pack = getattr(torch.ops.quantized, f"embedding_bag_{name}_prepack")
        unpack = getattr(torch.ops.quantized, f"embedding_bag_{name}_unpack")
        packed = pack(tensor)
        sections = [np.empty(size, np.uint8) for size in section_bytes(ENCODINGS[encoding], n, COLUMNS)]
        encode_rows(ENCODINGS[encoding], x, *sections, search=PLAIN)
        joined = np.concatenate([sections[k].reshape(n, -1) for k in (2, 0, 1)], axis=1)
        if joined.tobytes() != packed.numpy().tobytes():
            raise AssertionError(f"{encoding}: bits differ from torch's")
        speed = rates(
            0.5 if quick else 2.0, plain_work(encoding, x, pack, unpack, packed, sections, table, touched)
        )
        out += [
            row(f"{encoding} plain quantize, same bits", speed["plain"], "GB/s",
                peer="torch prepack", theirs=speed["prepack"], bar=0.9),
            row(f"{encoding} dequantize + scatter", speed["decode"], "GB/s",
                peer="torch unpack, index_copy_", theirs=speed["unpack, scatter"], bar=1.5),
            # The same against half of that work: a whole table into new pages, and frames into reused memory.
            row(f"{encoding} dequantize + scatter", speed["decode"], "GB/s",
                peer="unpack alone, new output", theirs=speed["unpack"]),
            row(f"{encoding} dequantize + scatter", speed["decode"], "GB/s",
                peer="unpack alone, in cache", theirs=speed["unpack by frames"]),
        ]  # fmt: skip
    return out


def plain_work(encoding, x, pack, unpack, packed, sections, table, touched) -> dict:
    tensor, target, rows = torch.from_numpy(x), table.numpy(), torch.from_numpy(touched)
    frames = packed.split(FRAME_ROWS)

    def unpack_by_frames() -> None:
        for frame in frames:
            unpack(frame)

    return {
        "prepack": (x.nbytes, lambda: pack(tensor)),
        "plain": (x.nbytes, encoder(encoding, x, PLAIN)),
        "unpack": (x.nbytes, lambda: unpack(packed)),
        "unpack by frames": (x.nbytes, unpack_by_frames),
        "unpack, scatter": (x.nbytes, lambda: table.index_copy_(0, rows, unpack(packed))),
        "decode": (
            x.nbytes,
            lambda: decode_scatter(ENCODINGS[encoding], *sections, 0, out=target, rows=touched),
        ),
    }


def adaptive(quick: bool) -> list[dict]:
    """Compare range searches: speed and error against torch's, and against greedy searches in the same kernels."""
    n = 8_000 if quick else FRAME_ROWS
    x = aligned(reference.rows_like("gaussian", n, COLUMNS))
    few = torch.from_numpy(x[:OPTIMIZED_ROWS])
    out = []
    for encoding in ("q4", "q3", "q2"):
        default = DEFAULT_SEARCH[encoding]
        searches = {"plain": PLAIN, "greedy25": GREEDY_25, "greedy200": GREEDY_200, "default": default}
        errors = {
            name: reference.mean_error(x, int(encoding[1:]), search) for name, search in searches.items()
        }
        work = {name: (x.nbytes, encoder(encoding, x, search)) for name, search in searches.items()}
        if encoding in TORCH:
            pack = getattr(torch.ops.quantized, f"embedding_bag_{TORCH[encoding]}_prepack")
            unpack = getattr(torch.ops.quantized, f"embedding_bag_{TORCH[encoding]}_unpack")
            theirs = reference.mean_l2(few.numpy(), unpack(pack(few, True)).numpy())
            work["torch"] = (few.nbytes, lambda: pack(few, True))  # noqa: B023 - used before the next turn
        speed = rates(0.5 if quick else 2.0, work)
        if encoding in TORCH:
            out += [
                row(f"{encoding} adaptive quantize", speed["default"], "GB/s",
                    peer="torch optimized_qparams(200, .16)", theirs=speed["torch"], bar=60),
                row(f"{encoding} error of that", reference.mean_error(few.numpy(), int(encoding[1:])), "L2",
                    peer="torch optimized_qparams(200, .16)", theirs=theirs, bar=1.0),
                row(f"{encoding} greedy(200, .16), same search", speed["greedy200"], "GB/s",
                    peer="torch optimized_qparams(200, .16)", theirs=speed["torch"], bar=15),
            ]  # fmt: skip
        best = "greedy200" if encoding == "q4" else "greedy25"
        title = "greedy(200, .16)" if encoding == "q4" else "greedy(25, .6)"
        out += [
            row(f"{encoding} adaptive quantize", speed["default"], "GB/s", peer="1 GB/s", theirs=1.0, bar=1.0),
            row(f"{encoding} adaptive quantize", speed["default"], "GB/s", peer=f"our {title}", theirs=speed[best]),
            row(f"{encoding} error of that", errors["default"], "L2",
                peer=f"our {title}", theirs=errors[best], bar=0.998),
            row(f"{encoding} error of that", errors["default"], "L2", peer="plain", theirs=errors["plain"]),
        ]  # fmt: skip
    return out


def comparison(quick: bool) -> list[dict]:
    """Compare the error of the paper's quantizers, from symmetric to k-means, with ours."""
    out = []
    for kind in ("gaussian", "student"):
        x = reference.rows_like(kind, 500 if quick else 2000, COLUMNS)
        for bits in (2, 3, 4):
            ours = reference.mean_error(x, bits)
            peers = {
                "symmetric": reference.symmetric(x, bits),
                "asymmetric": reference.asymmetric(x, bits),
                "k-means, 15 iterations": reference.k_means(x, bits),
            }
            out += [
                row(f"{kind} rows at {bits} bits", ours, "L2", peer=peer, theirs=reference.mean_l2(x, y))
                for peer, y in peers.items()
            ]
    return out


def others(quick: bool) -> list[dict]:
    n = 100_000 if quick else 400_000
    x = aligned(reference.rows_like("gaussian", n, COLUMNS))
    rng = np.random.default_rng(0)
    dense, sparse = np.flatnonzero(rng.random(4 * n) < 0.26), np.flatnonzero(rng.random(40 * n) < 0.01)
    bitmap, deltas = encode_ids(dense), encode_ids(sparse)
    copy = np.empty_like(x)
    speed = rates(
        0.5,
        {
            "row hashes": (x.nbytes, lambda: row_hashes([x], 1)),
            "memcpy": (x.nbytes, lambda: np.copyto(copy, x)),
            "row ids 26 % dense, encode": (dense.nbytes, lambda: encode_ids(dense)),
            "row ids 26 % dense, decode": (dense.nbytes, lambda: decode_ids(*bitmap, len(dense), (0, 4 * n))),
            "row ids 1 % dense, encode": (sparse.nbytes, lambda: encode_ids(sparse)),
            "row ids 1 % dense, decode": (
                sparse.nbytes,
                lambda: decode_ids(*deltas, len(sparse), (0, 40 * n)),
            ),
        },
    )
    memcpy = speed.pop("memcpy")
    return [
        row(what, value, "GB/s", **({"peer": "memcpy", "theirs": memcpy} if what == "row hashes" else {}))
        for what, value in speed.items()
    ]


def run(quick: bool = False) -> dict:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [*plain_and_decode(quick), *adaptive(quick), *others(quick), *comparison(quick)]
    finally:
        torch.set_num_threads(threads)
    return {"kernels": kernel_choice.active().__name__.rpartition(".")[2], "columns": COLUMNS, "rows": rows}
