"""Codecs of rows: encodings, quantizers, decoders, row ids, row hashes. Pure functions over numpy buffers.

Speed lives in kernels, each written twice: `numpy_kernel` (always there, slow) and `_native.c` (optional, built
into the wheel), equal bit for bit. `kernel_choice` chooses.
"""
