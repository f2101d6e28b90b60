"""What restores have done to a run's tables so far, as it rides in commits. Pure.

At each restore a table takes in the squared relative error of the encoding that the checkpoint holds it in. Only tables
that may be stored below 8 bit are counted: at 8 bit a restore adds some 2e-5, and thousands of them stay within budget.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltashard_checkpoint.deciding.cost import MAX_NUMBER, not_negative
from deltashard_checkpoint.errors import UserError

KEY = "deltashard/harm"
"""Name in a commit's metadata."""
MAX_TEXT = 30_000
"""Of the 60,000 characters of a commit's metadata; of more tables only the most harmed are told."""


class BadErrorLedger(UserError):
    """A record that cannot be read; it counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLedger:
    """Of the run up to a checkpoint."""

    restores: int = 0
    spent: Mapping[str, float] = field(default_factory=dict)
    """Table -> sum of e^2 over the restores so far."""
    error: Mapping[str, float] = field(default_factory=dict)
    """Table -> relative error of its rows as the checkpoint holds them: what a restore of it would add."""

    def after_restore(self) -> ErrorLedger:
        names = {*self.spent, *self.error}
        spent = {name: self.spent.get(name, 0.0) + self.error.get(name, 0.0) ** 2 for name in names}
        return ErrorLedger(restores=self.restores + 1, spent=spent)

    def text(self) -> str:
        """Its form in a commit's metadata: the most harmed tables where there are too many."""
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
    """The record in a commit's metadata; raises `BadErrorLedger`: whoever can write the bucket wrote it."""
    try:
        found: Any = json.loads(text[: MAX_TEXT + 1])  # what is longer was cut, and is no JSON
        pairs = {
            str(name): (not_negative(spent), not_negative(error))
            for name, (spent, error) in found["tables"].items()
        }
        restores = found["restores"]
        if type(restores) is not int or not 0 <= restores <= MAX_NUMBER:
            raise ValueError(restores)  # noqa: TRY301 - told below, as all that is wrong
        return ErrorLedger(
            restores=restores,
            spent={name: spent for name, (spent, _) in pairs.items() if spent},
            error={name: error for name, (_, error) in pairs.items() if error},
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadErrorLedger("the record of what restores did cannot be read", where=KEY) from None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
