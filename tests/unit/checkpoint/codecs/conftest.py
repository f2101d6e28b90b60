"""Fixtures of the codec tests: each test that takes `kernel_set` runs with every set of kernels."""

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from deltashard_checkpoint.codecs import kernel_choice, numpy_kernel

REFERENCE = Path(__file__).parents[4] / "bench" / "codecs_reference.py"
LEVELS = ("default", "avx2", "avx512")


def _native_at(name: str) -> Iterator[ModuleType]:
    """Return the native kernels at one instruction set; skip without a C compiler, fail if they are missing otherwise."""
    try:
        from deltashard_checkpoint.codecs import native_kernel
    except ImportError as e:
        if any(shutil.which(c) for c in ("cc", "gcc", "clang")):
            pytest.fail(f"a C compiler is installed, but the native kernels are missing: {e}")
        pytest.skip("no C compiler: the codecs use numpy")
    level = LEVELS.index(name)
    found = native_kernel.choose_level(level)
    if found == level:
        yield native_kernel
    native_kernel.choose_level()
    if found != level:
        pytest.skip(f"this machine has no {name}")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    yield from _native_at(request.param)


@pytest.fixture(params=["numpy", *LEVELS])
def kernel_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Run the test with numpy's and with the native kernels."""
    for chosen in [numpy_kernel] if request.param == "numpy" else _native_at(request.param):
        monkeypatch.setattr(kernel_choice, "active", lambda chosen=chosen: chosen)
        yield chosen


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("codecs_reference", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
