"""Which run a person means: a CheckpointRun's name, its workload's, or its run id. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltashard_checkpoint.errors import UserError

Document = Mapping[str, Any]


def is_over(run: Document) -> bool:
    return (run.get("status") or {}).get("phase") == "Finished"


def find_run(runs: Sequence[Document], name: str, namespace: str) -> Document:
    """The run of this name; of a workload that was made again under its name, the one that is not over, or the newest.

    Raises `UserError` where there is none, or several are meant.
    """
    for run in runs:
        if run["metadata"]["name"] == name:
            return run
    found = [run for run in runs if name in {run["spec"]["workload"]["name"], run["spec"]["runId"]}]
    found = [run for run in found if not is_over(run)] or _newest(found)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(run["metadata"]["name"] for run in found)
        raise UserError(
            f"{name!r} may be several runs", where=f"namespace {namespace}", remedy=f"say one of {names}"
        )
    names = ", ".join(run["metadata"]["name"] for run in runs[:10]) + (", ..." if len(runs) > 10 else "")
    raise UserError(
        f"there is no run {name!r}",
        where=f"namespace {namespace}",
        remedy=f"there are {names}" if runs else "there is none at all: another namespace, by -n?",
    )


def _newest(runs: Sequence[Document]) -> list[Document]:
    return sorted(runs, key=lambda each: str(each["metadata"].get("creationTimestamp", "")))[-1:]
