"""Watched namespaces: all, or a list from the chart.

Webhook, controller and the ValidatingAdmissionPolicies use the same list. Annotated workloads in other namespaces are
rejected with an explanation, because they would train without checkpoints.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

from deltashard_operator.kube.cluster_name import POLICY

MAX_NAMESPACES = 100
"""Each namespace has its own watch connections. Use all namespaces instead of a longer list."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def parse_namespaces(text: str) -> tuple[str, ...]:
    """Parse comma-separated namespaces; empty: all. Raises `ArgumentTypeError`: argparse hides `ValueError` texts."""
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        if not _LABEL.fullmatch(name):
            raise ArgumentTypeError(
                f"{name!r} is not a namespace: use a DNS label, at most 63 of a-z, 0-9 and -"
            )
    if len(names) > MAX_NAMESPACES:
        raise ArgumentTypeError(
            f"{len(names)} namespaces are more than {MAX_NAMESPACES}: leave the list empty to watch all"
        )
    return names


def is_watched(namespace: str, watched: tuple[str, ...]) -> bool:
    return not watched or namespace in watched


def not_watched(namespace: str) -> str:
    return f"namespace {namespace} is not watched by deltashard"


REMEDY = f"add it to watchNamespaces of the chart, or remove the annotation {POLICY}"
"""Without an apostrophe, because the text is also part of a CEL string."""
