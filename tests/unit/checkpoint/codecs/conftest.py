"""Both sets of kernels serve every test that asks for `kernel_set`; the slow yardsticks come from bench/."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from deltashard_checkpoint.codecs import kernel_choice, numpy_kernel

from tests.support.checkpoint.kernel import native

__all__ = ["native"]

REFERENCE = Path(__file__).parents[4] / "bench" / "codecs_reference.py"


@pytest.fixture(params=["numpy", "native"])
def kernel_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Makes numpy's or the native kernels serve the test."""
    chosen = numpy_kernel if request.param == "numpy" else request.getfixturevalue("native")
    monkeypatch.setattr(kernel_choice, "active", lambda: chosen)
    return chosen


@pytest.fixture(params=[0, 1, 2], ids=["default", "avx2", "avx512"])
def level(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[ModuleType]:
    """The native kernels at one instruction set; skipped above what this machine has."""
    if native.choose_level(request.param) != request.param:
        native.choose_level()
        pytest.skip(f"this machine has no {native.LEVELS[request.param]}")
    yield native
    native.choose_level()


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """bench/codecs_reference.py."""
    spec = importlib.util.spec_from_file_location("codecs_reference", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
