"""A GPU that torch can use: what needs one is skipped without it, and the run says so at its end (tests/conftest.py)."""

from __future__ import annotations

import re

import pytest
import torch

WHY = "no GPU: torch finds no CUDA device"
MISSING = re.compile(re.escape(WHY))
"""Why a test was skipped."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=WHY)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
