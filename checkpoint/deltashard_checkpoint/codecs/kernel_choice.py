"""Which kernels serve this process: the native ones where they were built, else numba's.

`DELTASHARD_KERNELS=numba|native` forces one (native then fails loudly where it is missing); `native-avx2` and
`native-default` hold the native ones below what the machine can. numba is imported only when it serves: importing it
costs a second and 100 MiB, which a sidecar with native kernels never pays.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

from deltashard_checkpoint.errors import UserError

VARIABLE = "DELTASHARD_KERNELS"
_NATIVE = {"native": 2, "native-avx2": 1, "native-default": 0}


@cache
def active() -> ModuleType:
    """The module of kernels in use, chosen once: `native_kernel` or `numba_kernel`.

    Raises `UserError` when the variable asks for something unknown or for native kernels that were not built.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "numba", *_NATIVE):
        raise UserError(f"{VARIABLE}={asked!r}", remedy=f"unset it, or one of numba, {', '.join(_NATIVE)}")
    if asked != "numba":
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
    from deltashard_checkpoint.codecs import numba_kernel

    return numba_kernel
