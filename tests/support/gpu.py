"""A GPU that torch can use: tests that need one are skipped without it, and tests/conftest.py reports the skips at the end."""

from __future__ import annotations

import re

import pytest
import torch

NO_GPU_REASON = "no GPU: torch finds no CUDA device"
MISSING = re.compile(re.escape(NO_GPU_REASON))
"""Why a test was skipped."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU_REASON)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
