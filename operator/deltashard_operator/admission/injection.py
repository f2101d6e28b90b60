"""Injection of the sidecar into a pod template. Pure.

`inject` adds: one native sidecar, first among the init containers but after a mesh proxy (which provides the network);
its volumes; one mount and one variable for the training container; the managed-by label, the marker, the policy's name
and the volume annotations for autoscalers and backups; one supplemental group if there is none; the policy's pull
secrets. It replaces a grace period of 30 s (the API's default) by the policy's. The rest of the template is unchanged,
so that an unchanged manifest can be re-applied to an immutable template.

A template with the marker is returned unchanged, whichever version injected it, because schedulers edit templates and
versions mix. So `inject(inject(x)) == inject(x)`. Only the workload's name and UID are added, which templates of kinds
other than Job cannot contain. `check_marked` verifies that the sidecar matches the annotations.

Re-applying a JobSet's manifest sends its lists without the injected elements. `restore_injected` adds them again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from deltashard_operator import VERSION
from deltashard_operator.admission import sidecar_container
from deltashard_operator.api import duration
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy, whole_blocks
from deltashard_operator.kube import quantity, run_identity
from deltashard_operator.kube.cluster_name import (
    ARENA_SIZE,
    BACKUP_EXCLUDED_VOLUMES,
    DEFAULT_CONTAINER,
    ENCODING,
    EVICTABLE_VOLUMES,
    INJECTED,
    INTERVAL,
    JOBSET_UID_LABEL,
    MANAGED_BY,
    MANAGED_BY_VALUE,
    OS_LABEL,
    POLICY,
    RESTORE_FROM,
    RUN_ID,
    RUNS,
    SHM_PATH,
    SHM_VOLUME,
    SIDECAR,
    SOCKET_PATH,
    SOCKET_VARIABLE,
    USER_ID,
    is_mesh_proxy,
)
from deltashard_operator.kube.run_identity import IdentityRecipe

_IDENTITY = (
    "DELTASHARD_WORKLOAD_KIND",
    "DELTASHARD_WORKLOAD_NAME",
    "DELTASHARD_WORKLOAD_UID",
    "DELTASHARD_INDEX",
    "DELTASHARD_REPLICA",
)
"""Variables that identify the run that a pod trains."""
_PODS = "DELTASHARD_PODS"
DEFAULT_GRACE_S = 30
"""The API's default grace period. It is indistinguishable from an explicit 30."""

Document = dict[str, Any]


def is_injected(template: Mapping[str, Any]) -> bool:
    return INJECTED in _annotations(template)


def _annotations(template: Mapping[str, Any]) -> Mapping[str, str]:
    return (template.get("metadata") or {}).get("annotations") or {}


def _sidecar(template: Mapping[str, Any]) -> Document | None:
    inits = (template.get("spec") or {}).get("initContainers") or []
    return next((each for each in inits if each.get("name") == SIDECAR), None)


def store_of(template: Mapping[str, Any]) -> str:
    """Return the store URL of an injected template's sidecar, or an empty string."""
    variables = (_sidecar(template) or {}).get("env") or []
    return next((str(each.get("value", "")) for each in variables if each["name"] == "DELTASHARD_URL"), "")


def inject(
    template: Mapping[str, Any],
    policy: Policy,
    recipe: IdentityRecipe,
    *,
    keep_grace: bool = False,
    queued: bool = False,
) -> Document:
    """Return a copy of the pod template (`metadata`, `spec`) with the sidecar.

    Args:
        template: pod template of a Job, or a pod.
        policy: policy resolved for this workload.
        recipe: how the pods determine their identity.
        keep_grace: the grace period is explicit even if it is 30.
        queued: Kueue admits the workload by its requested resources.

    Raises:
        Refusal: the template cannot be injected.
    """
    spec = template.get("spec") or {}
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    taken = any(each.get("name") == SIDECAR for each in containers)
    if is_injected(template):
        if not taken:
            raise Refusal(
                "MarkerWithoutSidecar",
                f"the template is marked as injected, but has no container {SIDECAR}",
                where=INJECTED,
                remedy="remove the annotation",
            )
        return _with_identity(template, recipe, policy.annotations.run_id)
    if taken:
        raise Refusal(
            "ContainerNameTaken",
            "a container has this name, and the template was not injected by deltashard",
            where=f"container {SIDECAR}",
            remedy="rename your container",
        )
    _check_supported(spec)
    trainer = _trainer(spec, policy.annotations.container or _default_container(template))
    grace_s = int(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
    if grace_s == DEFAULT_GRACE_S and not keep_grace:
        grace_s = policy.grace_s
    sidecar, volumes = sidecar_container.sidecar(
        spec, trainer, policy, recipe, grace_s=grace_s, queued=queued
    )
    ours = {each["name"]: each["emptyDir"] for each in volumes if "emptyDir" in each}
    disks = [name for name, source in ours.items() if source.get("medium") != "Memory"]
    notes = {  # the volumes need neither node retention nor backup: the store has the data
        POLICY: policy.name,
        EVICTABLE_VOLUMES: ",".join(disks),
        BACKUP_EXCLUDED_VOLUMES: ",".join(ours),
        INJECTED: VERSION,
    }
    secrets = [{"name": name} for name in policy.sidecar["imagePullSecrets"]]
    return _with_sidecar(template, str(trainer["name"]), sidecar, volumes, secrets, notes, grace_s)


def _with_sidecar(
    template: Mapping[str, Any],
    trainer: str,
    sidecar: Document,
    volumes: Sequence[Document],
    pull_secrets: Sequence[Document],
    notes: Mapping[str, str],
    grace_s: int,
) -> Document:
    """Return the template with these parts. An existing sidecar is replaced."""
    result = copy.deepcopy(dict(template))
    spec = result["spec"]
    _join(_trainer(spec, trainer))
    inits, ours = spec.get("initContainers") or [], copy.deepcopy(sidecar)
    if _sidecar(result) is None:  # first, but after native sidecars of meshes
        place = max((n for n, each in enumerate(inits, 1) if is_mesh_proxy(each.get("name"))), default=0)
        spec["initContainers"] = [*inits[:place], ours, *inits[place:]]
    else:
        spec["initContainers"] = [ours if each.get("name") == SIDECAR else each for each in inits]
    for key, wanted in (("volumes", volumes), ("imagePullSecrets", pull_secrets)):
        present = spec.get(key) or []
        names = {each.get("name") for each in present}
        if missing := [copy.deepcopy(each) for each in wanted if each["name"] not in names]:
            spec[key] = [*present, *missing]
    if grace_s != spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S):
        spec["terminationGracePeriodSeconds"] = grace_s
    context = spec.get("securityContext") or {}
    if not context.get("supplementalGroups") and "fsGroup" not in context:
        spec["securityContext"] = {**context, "supplementalGroups": [USER_ID]}
    result["metadata"] = labelled(result.get("metadata") or {})
    annotations = {key: note for key, note in notes.items() if note}
    result["metadata"]["annotations"] = {**annotations, **_annotations(result)}
    return result


def restore_injected(template: Mapping[str, Any], injected: Mapping[str, Any]) -> Document:
    """Return the updated template with the missing injected parts of `injected`, the template before the update.

    The sidecar is taken from `injected`: Trainer repeatedly re-applies its runtime's sidecar, which lacks the
    TrainJob's pod count, and a JobSet's templates are immutable.

    Raises:
        Refusal: the updated template cannot be injected.
    """
    spec, notes, sidecar = injected["spec"], _annotations(injected), _sidecar(injected)
    trainer = next((each["name"] for each in spec["containers"] if SHM_VOLUME in _mounted(each)), None)
    if sidecar is None or trainer is None:
        return copy.deepcopy(dict(template))
    grace_s = (template.get("spec") or {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    if grace_s == DEFAULT_GRACE_S:
        grace_s = spec.get("terminationGracePeriodSeconds", grace_s)
    volumes = [each for each in spec.get("volumes") or [] if each["name"] in _mounted(sidecar)]
    kept = {key: notes.get(key, "") for key in (POLICY, INJECTED, EVICTABLE_VOLUMES, BACKUP_EXCLUDED_VOLUMES)}
    return _with_sidecar(
        template, trainer, sidecar, volumes, spec.get("imagePullSecrets") or [], kept, grace_s
    )


def _mounted(container: Mapping[str, Any]) -> set[Any]:
    return {each.get("name") for each in container.get("volumeMounts") or []}


def _with_identity(template: Mapping[str, Any], recipe: IdentityRecipe, run_id: str) -> Document:
    """Return a marked template with the workload's identity, and for a JobSet the pod count, in its sidecar."""
    result = copy.deepcopy(dict(template))
    if (sidecar := _sidecar(result)) is None:
        return result
    variables: list[Document] = sidecar.get("env") or []
    if not {each["name"] for each in variables} >= set(_IDENTITY):
        identity = run_identity.environment(recipe, run_id)
        ours = {each["name"] for each in identity}
        variables = [*identity, *(each for each in variables if each["name"] not in ours)]
        # Definitions from before Kubernetes 1.28 drop the field.
        sidecar.setdefault("restartPolicy", "Always")
    if recipe.kind == "JobSet" and recipe.pods:  # a recreated JobSet may have more
        pods = next((each for each in variables if each["name"] == _PODS), None)
        if pods is None:
            variables = [*variables, pods := {"name": _PODS}]
        pods["value"] = str(recipe.pods)
    sidecar["env"] = variables
    return result


def check_marked(template: Mapping[str, Any], annotations: Annotations, recipe: IdentityRecipe) -> None:
    """Raise `Refusal` (CopiedManifest) if a marked template's sidecar does not match these annotations.

    A copy of an injected manifest (`kubectl get -o yaml`) contains the sidecar of the original workload, with its run,
    policy and owner. If those differ from the copy's annotations and owner, the copy would train under a different name
    or in another workload's run. A matching sidecar is accepted, because reinvocation repeats the injection after other
    webhooks.

    Only values that depend on annotations and owner alone are compared. Values from the policy may have changed since.
    """
    sidecar = _sidecar(template)
    if sidecar is None:
        return  # rejected by `inject`
    has = {str(each.get("name")): each for each in sidecar.get("env") or []}
    wants = {each["name"]: each for each in run_identity.environment(recipe, annotations.run_id)}
    by_label = _source(has.get("DELTASHARD_WORKLOAD_UID", {})) == _source(run_identity.JOBSET.uid or {})
    if recipe.kind == "JobSet" and by_label and "value" in (recipe.uid or {}):
        raise Refusal(
            "Unsupported",
            f"the JobSet controller writes no label {JOBSET_UID_LABEL}",
            where="JobSet",
            remedy="upgrade it to 0.9 or newer",
        )
    for name in _IDENTITY:
        if name in has and name in wants and _source(has[name]) != _source(wants[name]):
            raise _copied(INJECTED, "its sidecar was injected for another workload or kind")
    interval, precision = annotations.spec.get("interval", {}), annotations.spec.get("precision", {})
    settings = [
        ("DELTASHARD_POLICY", POLICY, annotations.policy),
        ("DELTASHARD_RUN_ID", RUN_ID, str(wants["DELTASHARD_RUN_ID"]["value"])),
        ("DELTASHARD_RUNS", RUNS, annotations.runs),
        ("DELTASHARD_RESTORE_FROM", RESTORE_FROM, sidecar_container.restore_from(annotations.restore_from)),
    ]
    if recipe.kind != "JobSet":
        settings.append((_PODS, INJECTED, str(recipe.pods or "")))
    if "every" in interval:
        every = sidecar_container.number(duration.seconds_of(interval["every"]))
        settings.append(("DELTASHARD_EVERY_S", INTERVAL, every))
    if "encoding" in precision:
        settings.append(("DELTASHARD_ENCODING", ENCODING, precision["encoding"]))
    if "arenaSize" in annotations.spec:
        arena = str(whole_blocks(quantity.bytes_of(annotations.spec["arenaSize"])))
        settings.append(("DELTASHARD_ARENA_BYTES", ARENA_SIZE, arena))
    for name, key, want in settings:
        value = has.get(name, {}).get("value", "")
        if value != want:
            raise _copied(key, f"its sidecar has {name}={value[:80]!r}, not {want!r}")


def _source(variable: Mapping[str, Any]) -> tuple[Any, Any]:
    return variable.get("value") or None, variable.get("valueFrom")


def _copied(where: str, what: str) -> Refusal:
    return Refusal(
        "CopiedManifest",
        f"the manifest was copied from an injected one, and {what}",
        where=where,
        remedy=f"remove the container {SIDECAR}, the volumes deltashard-* and the annotation {INJECTED} from it",
    )


def labelled(metadata: Mapping[str, Any]) -> Document:
    """Return metadata with the managed-by label, by which the controller selects its workloads."""
    return {**metadata, "labels": {**(metadata.get("labels") or {}), MANAGED_BY: MANAGED_BY_VALUE}}


def _check_supported(spec: Mapping[str, Any]) -> None:
    for where, system in (
        ("spec.os.name", (spec.get("os") or {}).get("name")),
        (f"spec.nodeSelector[{OS_LABEL}]", (spec.get("nodeSelector") or {}).get(OS_LABEL)),
    ):
        if system == "windows":
            raise Refusal("Unsupported", "the sidecar runs on Linux only", where=where)
    if not spec.get("containers"):
        raise Refusal("BadTemplate", "the pod template has no containers", where="spec.containers")
    for key in ("containers", "initContainers", "volumes"):
        if not all(each.get("name") for each in spec.get(key) or []):
            raise Refusal("BadTemplate", "one of them has no name", where=f"spec.{key}")


def _trainer(spec: Mapping[str, Any], name: str) -> Document:
    containers: list[Document] = spec.get("containers") or []
    if not name:
        return next((each for each in containers if not is_mesh_proxy(each.get("name"))), containers[0])
    for container in containers:
        if container.get("name") == name:
            return container
    raise Refusal(
        "BadAnnotation",
        f"the pod has no container {name!r}",
        where="deltashard.io/container",
        remedy=f"it must be one of {', '.join(str(each.get('name')) for each in containers)}",
    )


def _default_container(template: Mapping[str, Any]) -> str:
    """Return the pod's annotated default container. In Argo's pods the first container is not the main one."""
    name = _annotations(template).get(DEFAULT_CONTAINER, "")
    named = any(each.get("name") == name for each in template["spec"]["containers"])
    return name if named and not is_mesh_proxy(name) else ""


def _join(trainer: Document) -> None:
    """Add the shared volume and the socket's path to the training container."""
    where, mount = f"container {trainer['name']}", {"name": SHM_VOLUME, "mountPath": SHM_PATH}
    mounts, variables = trainer.get("volumeMounts") or [], trainer.get("env") or []
    there = next((m for m in mounts if str(m.get("mountPath", "")).rstrip("/") == SHM_PATH), None)
    if there is None:
        trainer["volumeMounts"] = [*mounts, mount]
    elif there.get("name") != SHM_VOLUME or there.get("readOnly") or there.get("subPath"):
        raise Refusal(
            "MountTaken",
            f"volume {there.get('name')!r} is mounted at {SHM_PATH}",
            where=where,
            remedy=f"mount it elsewhere; {SHM_PATH} is reserved for the sidecar's volume",
        )
    values = [each.get("value") for each in variables if each.get("name") == SOCKET_VARIABLE]
    if not values:
        trainer["env"] = [*variables, {"name": SOCKET_VARIABLE, "value": SOCKET_PATH}]
    elif values != [SOCKET_PATH]:
        what = f"{SOCKET_VARIABLE} is set to another value than {SOCKET_PATH}"
        raise Refusal("VariableTaken", what, where=where, remedy="remove it")
