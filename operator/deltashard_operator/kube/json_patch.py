"""A JSON patch (RFC 6902) from two documents, of `add` operations only.

Injection only adds. That is not believed but computed: an object that lost a key, or a list that lost or reordered an
element, has no such patch. `add` on a member that exists replaces it (RFC 6902, 4.1), which is how the grace period is
set. Elements of a list are the same when they are equal or bear the same `name`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from deltashard_checkpoint.errors import InternalBug

Operation = dict[str, Any]


class NotAnAddition(InternalBug):
    """The second document lacks something the first one has."""


def encoded(operations: Sequence[Operation]) -> str:
    return base64.b64encode(json.dumps(list(operations), separators=(",", ":")).encode()).decode()


def additions(before: Any, after: Any, path: str = "") -> list[Operation]:
    """Operations that, applied in order to `before`, give `after`; raises `NotAnAddition`."""
    found: list[Operation] = []
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        if lost := before.keys() - after.keys():
            raise NotAnAddition(f"{min(lost)!r} was removed", where=path)
        for key, value in after.items():
            inner = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            found += additions(before[key], value, inner) if key in before else [_add(inner, value)]
    elif isinstance(before, list) and isinstance(after, list):
        known = 0
        for index, value in enumerate(after):
            inner = f"{path}/{index}"
            if known < len(before) and _same(before[known], value):
                found += additions(before[known], value, inner)
                known += 1
            else:
                found.append(_add(inner, value))
        if known != len(before):
            raise NotAnAddition(f"element {known} was removed or moved", where=path)
    elif isinstance(before, (Mapping, list)):
        raise NotAnAddition("an object or a list was replaced", where=path)
    elif before != after or type(before) is not type(after):
        found.append(_add(path, after))
    return found


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


def _same(left: Any, right: Any) -> bool:
    named = isinstance(left, Mapping) and isinstance(right, Mapping) and "name" in left
    return left == right or (named and left["name"] == right.get("name"))
