"""The namespaces whose workloads deltashard looks after: all of them, or a list that the chart states.

Webhook, controller and the ValidatingAdmissionPolicies hold to the same list. What is annotated elsewhere is refused
and told so: it would train without checkpoints.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

from deltashard_operator.kube.cluster_name import POLICY

MAX_NAMESPACES = 100
"""Each is watched by connections of its own; who has more of them watches all."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def parse_namespaces(text: str) -> tuple[str, ...]:
    """Names, by commas; none: all namespaces. For argparse, which hides what a `ValueError` says."""
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        if not _LABEL.fullmatch(name):
            raise ArgumentTypeError(f"{name!r} is no namespace: a DNS label, at most 63 of a-z, 0-9 and -")
    if len(names) > MAX_NAMESPACES:
        raise ArgumentTypeError(
            f"{len(names)} namespaces are more than {MAX_NAMESPACES}: name none, which watches all"
        )
    return names


def is_watched(namespace: str, watched: tuple[str, ...]) -> bool:
    return not watched or namespace in watched


def not_watched(namespace: str) -> str:
    """What is wrong with an annotated workload of a namespace that is not watched."""
    return f"namespace {namespace} is not watched by deltashard"


REMEDY = f"have it added to watchNamespaces of the chart, or remove the annotation {POLICY}"
"""Without an apostrophe: it stands in CEL, too."""
