"""A JSON patch (RFC 6902) from two documents, of `add` operations only.

Injection only adds. That is not believed but computed: a patch is made from before and after; an object that lost a
key, or a list that lost or reordered an element, has no such patch, and asking for one raises `NotAnAddition`. `add`
on a member that exists replaces it (RFC 6902, 4.1), which is how the grace period is set.

Elements of a list are the same when they are equal or bear the same `name`.
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


def additions(before: Any, after: Any) -> list[Operation]:
    """Operations that, applied in order to `before`, give `after`; raises `NotAnAddition`."""
    operations: list[Operation] = []
    _walk(before, after, "", operations)
    return operations


def encoded(operations: Sequence[Operation]) -> str:
    return base64.b64encode(json.dumps(list(operations), separators=(",", ":")).encode()).decode()


def _walk(before: Any, after: Any, path: str, operations: list[Operation]) -> None:
    if before == after and type(before) is type(after):
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        _walk_object(before, after, path, operations)
    elif isinstance(before, list) and isinstance(after, list):
        _walk_list(before, after, path, operations)
    elif isinstance(before, (Mapping, list)):
        raise NotAnAddition("an object or a list was replaced", where=path)
    else:
        operations.append({"op": "add", "path": path, "value": after})


def _walk_object(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str, operations: list[Operation]
) -> None:
    lost = before.keys() - after.keys()
    if lost:
        raise NotAnAddition(f"{min(lost)!r} was removed", where=path)
    for key, value in after.items():
        inner = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        if key in before:
            _walk(before[key], value, inner, operations)
        else:
            operations.append({"op": "add", "path": inner, "value": value})


def _walk_list(before: list[Any], after: list[Any], path: str, operations: list[Operation]) -> None:
    known = 0
    for index, value in enumerate(after):
        if known < len(before) and _same(before[known], value):
            _walk(before[known], value, f"{path}/{index}", operations)
            known += 1
        else:
            operations.append({"op": "add", "path": f"{path}/{index}", "value": value})
    if known != len(before):
        raise NotAnAddition(f"element {known} was removed or moved", where=path)


def _same(left: Any, right: Any) -> bool:
    if left == right:
        return True
    return (
        isinstance(left, Mapping)
        and isinstance(right, Mapping)
        and left.get("name", 0) == right.get("name", 1)
    )
