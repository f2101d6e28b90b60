"""Row codecs: encodings, quantizers, decoders, row ids, row hashes. Pure functions over numpy buffers.

The kernels exist twice, with bit-identical results: `numpy_kernel` (always available, slow) and `_native.c` (optional,
built into the wheel). `kernel_choice` selects one.
"""
