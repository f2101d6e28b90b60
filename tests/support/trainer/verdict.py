"""A run that was killed and resumed has two allowed outcomes: it is exact, or deltashard reported why it is not."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

REPORTED = re.compile(r"note: |warning: |error: |event (nothing_saved|fell_back|log_damaged|save_blocked)")
NOISE = re.compile(r"tracked by row hashes|tracked by hashes|counts? as changed")
"""Lines about how tables are tracked, which are not significant."""
UNRELATED = re.compile(
    r"the model changed after the Checkpointer was built|the last step\(\) ended no step of an optimizer|set other hyperparameters"
)
"""Lines that do not explain why a resumed run differs: their subject is restored exactly, or refused."""


class CapturedLog(logging.Handler):
    """Appends deltashard's log messages at level WARNING and above to `lines`."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines
        logging.getLogger("deltashard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"warning: {record.getMessage()}")


def reported_lines(lines: Iterable[str]) -> list[str]:
    """Return the significant lines, sorted, without duplicates."""
    return sorted({line for line in lines if REPORTED.match(line) and not NOISE.search(line)})


def explanations(lines: Iterable[str]) -> list[str]:
    """Return the lines that explain why a resumed run differs."""
    return [line for line in reported_lines(lines) if not UNRELATED.search(line)]


def bits(name: str, value: Any) -> dict[str, bytes]:
    """Return the bytes of every tensor and number in a nested value, by its path."""
    found: dict[str, bytes] = {}
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        found[name] = str(dense.dtype).encode() + dense.contiguous().cpu().numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found |= bits(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            found |= bits(f"{name}.{number}", each)
    elif isinstance(value, bool | int | float | str | None):
        found[name] = repr(value).encode()
    return found


def optimizer_bits(name: str, optimizer: Any) -> dict[str, bytes]:
    """Return the state and the learning rates of an optimizer, by group and parameter index."""
    found: dict[str, bytes] = {}
    for number, group in enumerate(optimizer.param_groups):
        found |= bits(f"{name}.{number}.lr", group["lr"])
        for index, p in enumerate(group["params"]):
            found |= bits(f"{name}.{number}.{index}", dict(optimizer.state.get(p, {})))
    return found


def differing(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Return the paths whose bits differ."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
