"""The vocabulary costs nothing to import."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "torch", "google.protobuf", "grpc")


def test_its_import_loads_no_codecs() -> None:
    """A webhook or a docs page that needs a name loads neither numpy nor what is built on it."""
    script = f"import sys, deltashard_checkpoint.vocabulary; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
