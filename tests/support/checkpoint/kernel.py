"""The native kernels as a fixture: a conftest of whoever needs them imports it."""

import shutil
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The native kernels; their absence is only excused where there is no C compiler."""
    try:
        from deltashard_checkpoint.codecs import native_kernel
    except ImportError as e:
        if any(shutil.which(c) for c in ("cc", "gcc", "clang")):
            pytest.fail(f"a C compiler is here, but no native kernels: {e}")
        pytest.skip("no C compiler: numpy serves")
    return native_kernel
