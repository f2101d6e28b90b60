"""Selection of this process' kernels: native if built, else numpy's, which are slow.

`DELTASHARD_KERNELS=numpy|native` forces one (native raises an error if not built); `native-avx2` and `native-default`
limit the native kernels' instruction set.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

from deltashard_checkpoint.errors import UserError

VARIABLE = "DELTASHARD_KERNELS"
SLOW_MESSAGE = (
    "numpy encodes and decodes rows in this process, about 100 times slower than the native kernels, which were not "
    "built: install a wheel, or install from source with GCC"
)
_NATIVE = {"native": 2, "native-avx2": 1, "native-default": 0}


@cache
def active() -> ModuleType:
    """Return the kernel module in use, selected once: `native_kernel` or `numpy_kernel`.

    Raises `UserError` if the variable has an unknown value, or requires native kernels that were not built.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "numpy", *_NATIVE):
        raise UserError(f"{VARIABLE}={asked!r}", remedy=f"unset it, or one of numpy, {', '.join(_NATIVE)}")
    if asked != "numpy":
        try:
            from deltashard_checkpoint.codecs import native_kernel
        except ImportError as e:
            if asked:
                raise UserError(
                    "the native kernels were not built",
                    where=str(e),
                    remedy=f"install a C compiler, or unset {VARIABLE}",
                ) from e
        else:
            native_kernel.choose_level(_NATIVE.get(asked, 2))
            return native_kernel
    from deltashard_checkpoint.codecs import numpy_kernel

    return numpy_kernel


def is_slow() -> bool:
    """Whether the numpy kernels are in use; then warn with `SLOW_MESSAGE`. Raises like `active`."""
    return active().__name__.endswith(".numpy_kernel")
