"""Accumulated restore errors of a run's tables, stored in commits. Pure.

Each restore adds to a table the squared relative error of the encoding that the checkpoint stores it in. Only tables
that may be stored below 8 bit are counted: at 8 bit a restore adds about 2e-5, so thousands stay within budget.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltashard_checkpoint.deciding.cost import MAX_NUMBER, not_negative
from deltashard_checkpoint.errors import UserError

KEY = "deltashard/error-ledger"
"""Key in a commit's metadata."""
MAX_TEXT = 30_000
"""Maximum length, of the 60,000 characters of a commit's metadata; only the most affected tables are kept."""


class BadErrorLedger(UserError):
    """The recorded ledger cannot be parsed; it is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLedger:
    """Restore errors of the run up to a checkpoint."""

    restores: int = 0
    spent: Mapping[str, float] = field(default_factory=dict)
    """Table -> sum of e^2 over the restores so far."""
    error: Mapping[str, float] = field(default_factory=dict)
    """Table -> relative error of its rows as stored in the checkpoint, which a restore would add."""

    def after_restore(self) -> ErrorLedger:
        names = {*self.spent, *self.error}
        spent = {name: self.spent.get(name, 0.0) + self.error.get(name, 0.0) ** 2 for name in names}
        return ErrorLedger(restores=self.restores + 1, spent=spent)

    def text(self) -> str:
        """Return its form in a commit's metadata, truncated to the most affected tables."""
        names = sorted(
            {*self.spent, *self.error},
            key=lambda name: (-self.spent.get(name, 0.0) - self.error.get(name, 0.0) ** 2, name),
        )
        text = self._text(names)
        while len(text) > MAX_TEXT:
            names = names[: len(names) // 2]
            text = self._text(names)
        return text

    def _text(self, names: list[str]) -> str:
        document = {
            "restores": self.restores,
            "tables": {
                name: [_rounded(self.spent.get(name, 0.0)), _rounded(self.error.get(name, 0.0))]
                for name in names
            },
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


def parse_metadata(text: str) -> ErrorLedger:
    """Parse the ledger in a commit's metadata, which is untrusted; raises `BadErrorLedger`."""
    try:
        found: Any = json.loads(text[: MAX_TEXT + 1])  # longer text was truncated and is not JSON
        pairs = {
            str(name): (not_negative(spent), not_negative(error))
            for name, (spent, error) in found["tables"].items()
        }
        restores = found["restores"]
        if type(restores) is not int or not 0 <= restores <= MAX_NUMBER:
            raise ValueError(restores)  # noqa: TRY301 - reported below, like every other fault
        return ErrorLedger(
            restores=restores,
            spent={name: spent for name, (spent, _) in pairs.items() if spent},
            error={name: error for name, (_, error) in pairs.items() if error},
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadErrorLedger("the recorded restore errors cannot be parsed", where=KEY) from None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
