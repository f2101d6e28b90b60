"""Selection of a run by the name of its CheckpointRun or workload, or by its run id. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltashard_checkpoint.errors import UserError

Document = Mapping[str, Any]


def is_over(run: Document) -> bool:
    return (run.get("status") or {}).get("phase") == "Finished"


def find_run(runs: Sequence[Document], name: str, namespace: str) -> Document:
    """Return the run of this name; for a recreated workload, the unfinished run, or else the newest one.

    Raises `UserError` if there is no such run, or if the name is ambiguous.
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
            f"{name!r} matches several runs", where=f"namespace {namespace}", remedy=f"use one of {names}"
        )
    names = ", ".join(run["metadata"]["name"] for run in runs[:10]) + (", ..." if len(runs) > 10 else "")
    raise UserError(
        f"there is no run {name!r}",
        where=f"namespace {namespace}",
        remedy=f"use one of {names}" if runs else "the namespace has no runs: select another one by -n",
    )


def _newest(runs: Sequence[Document]) -> list[Document]:
    return sorted(runs, key=lambda each: str(each["metadata"].get("creationTimestamp", "")))[-1:]
