"""Chosen rows of a table, one after another, into a buffer: what a cut copies while training stands still.

The rows are asked for ahead of their turn, since they lie far apart, and a large result is written around the caches:
another process reads it next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs import kernels
from deltashard_checkpoint.codecs.encodings import EncodingError

Bytes = npt.NDArray[np.uint8]


def gather_rows(values: Bytes, rows: npt.NDArray[np.int64], out: Bytes) -> None:
    """out[i] = values[rows[i]].

    Args:
        values: uint8 [R, w], rows contiguous, any stride between them.
        rows: contiguous int64 [n], in any order, repeats allowed.
        out: C-contiguous uint8 [n, w].

    Raises:
        EncodingError: shapes that do not fit, or a position outside of `values`.
    """
    if (
        values.ndim != 2
        or values.strides[1] != 1
        or rows.dtype != np.int64
        or not rows.flags.c_contiguous
        or out.shape != (len(rows), values.shape[1])
        or not out.flags.c_contiguous
    ):
        raise EncodingError(
            f"rows {list(rows.shape)} of {list(values.shape)} into {list(out.shape)}",
            remedy="uint8 [R, w], int64 [n] and uint8 [n, w], contiguous",
        )
    if not len(rows):
        return
    k = kernels.active()
    bad = int(k.check_rows(rows, _ALL, len(values)))
    if bad >= 0:
        raise EncodingError(f"row {int(rows[bad])} of a table of {len(values)}")
    k.gather(values, rows, out)


_ALL = np.empty(0, np.bool_)
