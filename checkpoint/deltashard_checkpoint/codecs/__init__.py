"""Codecs of rows: encodings, quantizers, decoders, row ids, row hashes. Pure functions over numpy buffers.

Speed lives in kernels, each written twice: `_reference` (numba, always there) and `_native.c` (optional, built into
the wheel), equal bit for bit. `kernel_choice` chooses.
"""
