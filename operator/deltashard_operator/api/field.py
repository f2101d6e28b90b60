"""The fields of a policy's spec: typed access, and refusals that name a field's whole path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from deltashard_checkpoint.deciding.goal import BadGoal
from deltashard_checkpoint.deciding.goal import goal as goal_of
from deltashard_checkpoint.deciding.precision import MAX_TABLES, text_of
from deltashard_checkpoint.vocabulary import ENCODING_CHOICES

from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import quantity

NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
"""Of an object of the cluster."""
MAX_INT = 1 << 40
_TABLE = re.compile(r"[^=,\s\x00-\x1f\x7f-\x9f]{1,253}")


class Fields:
    """One object of a spec: typed access, and refusals that name the field's whole path."""

    def __init__(self, policy: str, path: str, value: Any) -> None:
        self.policy = policy
        self.path = path
        self.present = value is not None
        if value is not None and not isinstance(value, Mapping):
            raise Refusal("BadPolicy", f"{path} is no object", where=f"CheckpointPolicy {policy}")
        self._value: Mapping[str, Any] = value or {}

    def fail(self, key: str, takes: str) -> NoReturn:
        """Raises the `Refusal` of the field's value, with what it takes."""
        value = self._value.get(key)
        said = "is missing" if value is None else f"is {str(value)[:80]!r}"
        raise Refusal(
            "BadPolicy",
            f"{self.path}.{key} {said}",
            where=f"CheckpointPolicy {self.policy}",
            remedy=f"it takes {takes}",
        )

    def fields(self, key: str) -> Fields:
        """The object in a field; empty where there is none."""
        return Fields(self.policy, f"{self.path}.{key}", self._value.get(key))

    def text(self, key: str, default: str, pattern: re.Pattern[str] | None = None) -> str:
        value = self._value.get(key, default)
        if not isinstance(value, str) or (value and pattern and not pattern.fullmatch(value)):
            self.fail(key, f"a string that matches {pattern.pattern}" if pattern else "a string")
        return value

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(key, default)
        return value if value in choices else self.fail(key, f"one of {', '.join(choices)}")

    def integer(self, key: str, default: int, *, low: int = 0, high: int = MAX_INT) -> int:
        value = self._value.get(key, default)
        if type(value) is not int or not low <= value <= high:
            self.fail(key, f"an integer from {low} to {high}")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._value.get(key, default)
        return value if isinstance(value, bool) else self.fail(key, "true or false")

    def goal(self, key: str, default: str) -> str:
        value = self.text(key, default)
        try:
            goal_of(value)
        except BadGoal as error:
            self.fail(key, error.remedy)
        return value

    def one_of(self, key: str, default: int, choices: tuple[int, ...]) -> int:
        """One of several integers; `default` where none is stated."""
        value = self._value.get(key, default)
        if type(value) is not int or (key in self._value and value not in choices):
            self.fail(key, f"one of {', '.join(map(str, choices))}")
        return value

    def tables(self, key: str) -> str:
        """Encodings by table, as the sidecar takes them."""
        value = self._value.get(key) or {}
        takes = f"encodings by table, such as emb.user: q8, of {', '.join(ENCODING_CHOICES)}"
        if not isinstance(value, Mapping):
            self.fail(key, takes)
        for table, encoding in value.items():
            if not isinstance(table, str) or not _TABLE.fullmatch(table) or encoding not in ENCODING_CHOICES:
                self.fail(key, takes)
        text = text_of(value)
        return text if len(text) <= MAX_TABLES else self.fail(key, f"at most {MAX_TABLES} characters in all")

    def nullable_integer(self, key: str, default: int) -> int | None:
        """An integer, or None where that is written."""
        return None if key in self._value and self._value[key] is None else self.integer(key, default, low=1)

    def says(self, key: str) -> bool:
        """Whether the field is stated, and not empty."""
        return self._value.get(key) not in (None, "")

    def only(self, *known: str, takes: str = "") -> None:
        for key in self._value:
            if key not in known:
                self.fail(key, f"nothing: there is no such field. This has {takes or ', '.join(known)}")

    def items(self, key: str, most: int) -> list[Fields]:
        value = self._value.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            self.fail(key, f"a list of at most {most} objects")
        return [
            Fields(self.policy, f"{self.path}.{key}[{n}]", {} if v is None else v)
            for n, v in enumerate(value)
        ]

    def texts(self, key: str, most: int) -> dict[str, str]:
        value = self._value.get(key) or {}
        if (
            not isinstance(value, Mapping)
            or len(value) > most
            or not all(
                isinstance(k, str) and isinstance(v, str) and len(k) + len(v) <= 1024
                for k, v in value.items()
            )
        ):
            self.fail(key, f"text by name, at most {most}, each of at most 1024 characters")
        return dict(value)

    def names(self, key: str) -> tuple[str, ...]:
        value = self._value.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) and NAME.fullmatch(v) for v in value):
            self.fail(key, "a list of names")
        return tuple(value)

    def bytes(self, key: str, default: int, *, low: int = 1, high: int = 1 << 60) -> int:
        try:
            value = quantity.bytes_of(self._value.get(key, default))
        except (TypeError, ValueError):
            value = -1
        if not low <= value <= high:
            self.fail(key, f"a quantity from {quantity.format_bytes(low)} to {quantity.format_bytes(high)}")
        return value

    def millis(self, key: str, default: int) -> int:
        """A quantity of processors, in thousandths."""
        if key not in self._value:
            return default
        try:
            value = quantity.millis_of(self._value[key])
        except (TypeError, ValueError):
            value = 0
        return (
            value if 0 < value <= MAX_INT else self.fail(key, "a quantity of processors, such as 500m or 2")
        )
