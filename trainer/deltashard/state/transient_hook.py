"""Hooks on modules that do nothing in a copy or pickle of the model."""

from __future__ import annotations

from typing import Any, Self


class TransientHook:
    """A callable that does nothing if it is constructed without arguments, as its copies and pickles are."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return (type(self), ())
