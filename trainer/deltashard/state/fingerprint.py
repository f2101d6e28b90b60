"""Facts of the environment that bit-exactness depends on: recorded with every attempt, compared on resume.

Training from the same state gives the same bits only with the same torch, thread count, instruction set and
deterministic flags (1 or 2 threads, or AVX-512 or AVX2, change sums). A difference is not an error: it is logged once.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch


@functools.cache
def library_version() -> str:
    """Version of the installed deltashard distribution, or "unknown" in a bare source tree."""
    try:
        return version("deltashard")
    except PackageNotFoundError:
        return "unknown"


def fingerprint() -> dict[str, str]:
    """Return the facts as short strings; keys are stable across versions."""
    facts = {
        "library": library_version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    if torch.cuda.is_available():
        facts["cuda"] = str(torch.version.cuda)
        facts["device"] = torch.cuda.get_device_name()
        facts["cudnn_deterministic"] = str(torch.backends.cudnn.deterministic)
        facts["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
        facts["tf32"] = str(torch.backends.cuda.matmul.allow_tf32)
    return facts


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{key}: {then[key]} -> {now[key]}"
        for key in sorted(then.keys() & now.keys())
        if then[key] != now[key]
    ]
