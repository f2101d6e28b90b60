"""A template that was injected before: does its sidecar still do what the annotations say? Pure.

An injected manifest that is copied (`kubectl get -o yaml`) brings the sidecar of the workload it was copied from, with
its run, its policy and its owner. Where these are not what the copy's annotations and owner say, it would train under
another name than its author reads, or into the run of another workload: it is refused. What is as it was said is let
through, since injection is asked again whenever another webhook changed something.

Only what every version writes in the same way is compared; settings that a policy gives may have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltashard_operator.kube import run_identity
from deltashard_operator.kube.cluster_name import (
    ARENA_SIZE,
    BITS,
    INJECTED,
    INTERVAL,
    POLICY,
    RUN_ID,
    SIDECAR,
)
from deltashard_operator.kube.run_identity import IdentityRecipe
from deltashard_operator.policy.annotation import Annotations, seconds
from deltashard_operator.policy.refusal import Refusal
from deltashard_operator.policy.workload_policy import whole_blocks

IDENTITY = (
    "DELTASHARD_WORKLOAD_KIND",
    "DELTASHARD_WORKLOAD_NAME",
    "DELTASHARD_WORKLOAD_UID",
    "DELTASHARD_INDEX",
    "DELTASHARD_REPLICA",
)


def check(template: Mapping[str, Any], said: Annotations, recipe: IdentityRecipe) -> None:
    """Raise `Refusal` (CopiedManifest) where a marked template's sidecar is not that of these annotations."""
    sidecar = next(
        (
            each
            for each in (template.get("spec") or {}).get("initContainers") or []
            if each.get("name") == SIDECAR
        ),
        None,
    )
    if sidecar is None:
        return  # `inject` says so
    has = {str(each.get("name")): _bare(each) for each in sidecar.get("env") or []}
    wants = {each["name"]: _bare(each) for each in run_identity.environment(recipe, said.run_id)}
    for name in IDENTITY:
        if name in has and has[name] != wants[name]:
            raise _copied(INJECTED, "its sidecar was put in for another workload, or for one of another kind")
    for name, key, want in _settings(said, wants):
        value = has.get(name, {}).get("value")
        if value is not None and value != want:
            raise _copied(key, f"the sidecar that is in it already has {name}={value[:80]!r}, not {want!r}")


def _settings(said: Annotations, wants: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(variable, annotation, value) of what the annotations decide alone."""
    found = [
        ("DELTASHARD_POLICY", POLICY, said.policy),
        ("DELTASHARD_RUN_ID", RUN_ID, str(wants["DELTASHARD_RUN_ID"]["value"])),
    ]
    if said.every_s:
        found.append(("DELTASHARD_EVERY_S", INTERVAL, seconds(said.every_s)))
    if said.encoding is not None:
        found.append(("DELTASHARD_ENCODING", BITS, said.encoding))
    if said.arena_bytes is not None:
        found.append(("DELTASHARD_ARENA_BYTES", ARENA_SIZE, str(whole_blocks(said.arena_bytes))))
    return found


def _bare(variable: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in variable.items() if value}


def _copied(where: str, what: str) -> Refusal:
    return Refusal(
        "CopiedManifest",
        f"the manifest was copied from an injected one, and {what}",
        where=where,
        remedy=f"take the container {SIDECAR}, the volumes deltashard-* and the annotation {INJECTED} out of it",
    )
