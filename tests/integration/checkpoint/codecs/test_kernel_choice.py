"""The choice of kernels in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys


def _python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


USE = """
import numpy as np
from deltashard_checkpoint.codecs import decoder, kernel_choice, quantizer, row_id, row_kernel
from deltashard_checkpoint.vocabulary import ENCODINGS
b = [np.empty(64, np.uint8) for _ in range(3)]
quantizer.encode_rows(ENCODINGS["q4"], np.ones((2, 8), np.float32), *b)
row_id.decode_ids(*row_id.encode_ids(np.array([1, 5, 900])), 3, (0, 1000))
row_kernel.row_hashes([np.ones((2, 8), np.float32)], 1)
print(kernel_choice.active().__name__.rpartition(".")[2], kernel_choice.slow())
"""


def test_native_kernels_serve_where_they_were_built(native):
    assert _python(USE) == "native_kernel False"
    assert _python(USE, DELTASHARD_KERNELS="native-default") == "native_kernel False"


def test_the_variable_forces_numpy():
    assert _python(USE, DELTASHARD_KERNELS="numpy") == "numpy_kernel True"
