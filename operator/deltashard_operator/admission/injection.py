"""`inject`: a pod template and a policy in, the template with its sidecar out. Pure, and the whole of what is changed.

What it adds: one native sidecar, first among the init containers (behind a mesh's proxy, its way to the network); its
volumes; one mount and one variable for the training container; the managed-by label, the marker, the policy's name and
what autoscalers and backups should know of the volumes; one supplemental group where there is none; pull secrets of the
policy. What it changes: a grace period of 30 s (the API's default) becomes the policy's. All else is the user's and
stays as written, so that an unchanged manifest can be applied again to an immutable template.

A template with the marker is returned as it is, whatever it holds and whichever version put it there: schedulers edit
templates, and versions mix. So `inject(inject(x)) == inject(x)`. Only the workload's name and UID are added where a
template of another kind than a Job's could not say them. Whether its sidecar is the one that its annotations mean is
`check_marked`'s question.

Who applies the manifest of a JobSet again sends its lists without what was put into them. `put_back` adds it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_operator import VERSION
from deltashard_operator.admission import sidecar_container, sidecar_resource, sidecar_volume
from deltashard_operator.admission.sidecar_container import Place
from deltashard_operator.api.annotation import Annotations, seconds
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy, whole_blocks
from deltashard_operator.kube import run_identity
from deltashard_operator.kube.cluster_name import (
    ARENA_SIZE,
    DEFAULT_CONTAINER,
    ENCODING,
    EVICTABLE_VOLUMES,
    INJECTED,
    INTERVAL,
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
    UNSAVED_VOLUMES,
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
"""Variables that say whose run a pod trains."""
_PODS = "DELTASHARD_PODS"
_NOTES = (POLICY, INJECTED, EVICTABLE_VOLUMES, UNSAVED_VOLUMES)
"""Annotations of an injected template."""
DEFAULT_GRACE_S = 30
"""What the API gives a pod that does not say; nobody can tell it from a 30 that was written."""

Document = dict[str, Any]


def is_injected(template: Mapping[str, Any]) -> bool:
    return INJECTED in ((template.get("metadata") or {}).get("annotations") or {})


def _sidecar(template: Mapping[str, Any]) -> Document | None:
    """The sidecar of an injected template."""
    inits = (template.get("spec") or {}).get("initContainers") or []
    return next((each for each in inits if each.get("name") == SIDECAR), None)


def has_sidecar(template: Mapping[str, Any]) -> bool:
    """Whether any container of the template has the sidecar's name."""
    containers = (template.get("spec") or {}).get("containers") or []
    return _sidecar(template) is not None or any(each.get("name") == SIDECAR for each in containers)


def store_of(template: Mapping[str, Any]) -> str:
    """The store of an injected template's sidecar; empty: there is none."""
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
    """The pod template (`metadata`, `spec`) with the sidecar in it; the argument is not touched.

    Args:
        template: of a Job, or a pod itself.
        policy: resolved for this workload.
        recipe: how its pods learn who they are.
        keep_grace: the grace period is known to be the user's word even if it is 30.
        queued: Kueue admits the workload, by the resources that it requests.

    Raises:
        Refusal: the template cannot be injected as it is written.
    """
    if is_injected(template):
        if not has_sidecar(template):
            raise Refusal(
                "MarkerWithoutSidecar",
                f"it says the template was injected, but there is no container {SIDECAR}",
                where=INJECTED,
                remedy="remove the annotation",
            )
        return _identified(template, recipe, policy.run_id)
    if has_sidecar(template):
        raise Refusal(
            "ContainerNameTaken",
            "a container has this name, and the template was not injected by deltashard",
            where=f"container {SIDECAR}",
            remedy="rename your container",
        )
    spec = template.get("spec") or {}
    _check_supported(spec)
    trainer = _trainer(spec, policy.container or _default_container(template))
    added = sidecar_volume.of_pod(spec, policy)
    grace_s = _grace_s(spec, policy, keep=keep_grace)
    host_network = bool(spec.get("hostNetwork"))
    place = Place(
        recipe=recipe,
        volumes=added,
        resources=sidecar_resource.of_sidecar(
            spec, policy, cache_volume_bytes=added.node_disk_bytes, queued=queued
        ),
        group=group_of(spec),
        metrics_port=metrics_port(spec, policy),
        declares_port=not host_network,
        grace_s=grace_s,
        profile_key=sidecar_container.profile_key(spec, trainer),
    )
    parts = _Parts(
        trainer=str(trainer.get("name")),
        sidecar=sidecar_container.sidecar(policy, place),
        volumes=added.added,
        grace_s=grace_s,
        pull_secrets=tuple({"name": name} for name in policy.image_pull_secrets),
        notes={POLICY: policy.name, **_volume_notes(added.added), INJECTED: VERSION},
    )
    return _assembled(template, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What is put into a template."""

    trainer: str
    sidecar: Document
    volumes: tuple[Document, ...]
    grace_s: int
    pull_secrets: tuple[Document, ...]
    notes: Mapping[str, str]


def _assembled(template: Mapping[str, Any], parts: _Parts) -> Document:
    result = copy.deepcopy(dict(template))
    spec = result["spec"]
    _join(_trainer(spec, parts.trainer))
    if not has_sidecar(result):
        inits = list(spec.get("initContainers") or [])
        inits.insert(_position(inits), copy.deepcopy(parts.sidecar))
        spec["initContainers"] = inits
    _add_named(spec, "volumes", parts.volumes)
    if parts.grace_s != spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S):
        spec["terminationGracePeriodSeconds"] = parts.grace_s
    _share_group(spec)
    _add_named(spec, "imagePullSecrets", parts.pull_secrets)
    result["metadata"] = labelled(result.get("metadata") or {})
    result["metadata"]["annotations"] = {**parts.notes, **(result["metadata"].get("annotations") or {})}
    return result


def put_back(template: Mapping[str, Any], injected: Mapping[str, Any]) -> Document:
    """The template, with what it lacks of that which was put into `injected`, as it was before an update.

    The sidecar is the one that it had: Trainer applies its runtime's again and again, which does not know how many pods
    its TrainJob has, and a JobSet's templates never change.

    Raises:
        Refusal: it has no place for it any more.
    """
    spec = injected["spec"]
    sidecar = _sidecar(injected)
    trainer = next((each["name"] for each in spec["containers"] if _mounts(each, SHM_VOLUME)), None)
    if sidecar is None or trainer is None:
        return copy.deepcopy(dict(template))
    notes = injected["metadata"]["annotations"]
    stated = (template.get("spec") or {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    parts = _Parts(
        trainer=trainer,
        sidecar=sidecar,
        volumes=tuple(each for each in spec.get("volumes") or [] if _mounts(sidecar, each["name"])),
        grace_s=spec.get("terminationGracePeriodSeconds", stated) if stated == DEFAULT_GRACE_S else stated,
        pull_secrets=tuple(spec.get("imagePullSecrets") or []),
        notes={key: notes[key] for key in _NOTES if key in notes},
    )
    result = _assembled(template, parts)
    inits = result["spec"]["initContainers"]
    result["spec"]["initContainers"] = [sidecar if each["name"] == SIDECAR else each for each in inits]
    return result


def _volume_notes(volumes: tuple[Document, ...]) -> dict[str, str]:
    """Nothing in the volumes is worth a node that has to stay, or a backup: the store has it."""
    ours = {each["name"]: each["emptyDir"] for each in volumes if "emptyDir" in each}
    disks = [name for name, source in ours.items() if source.get("medium") != "Memory"]
    found = {EVICTABLE_VOLUMES: disks, UNSAVED_VOLUMES: list(ours)}
    return {key: ",".join(names) for key, names in found.items() if names}


def _mounts(container: Mapping[str, Any], volume: str) -> bool:
    return any(each.get("name") == volume for each in container.get("volumeMounts") or [])


def _identified(template: Mapping[str, Any], recipe: IdentityRecipe, run_id: str | None) -> Document:
    """A marked template, whose sidecar knows its workload, and how many pods of a JobSet there are."""
    result = copy.deepcopy(dict(template))
    sidecar = next(each for each in result["spec"]["initContainers"] if each["name"] == SIDECAR)
    variables: list[Document] = sidecar.get("env") or []
    has = {each["name"]: each for each in variables}
    if not has.keys() >= set(_IDENTITY):
        identity = run_identity.environment(recipe, run_id)
        ours = {each["name"] for each in identity}
        sidecar["env"] = variables = [*identity, *(each for each in variables if each["name"] not in ours)]
        # Definitions of before Kubernetes 1.28 drop it.
        sidecar.setdefault("restartPolicy", "Always")
    if recipe.kind == "JobSet" and recipe.pods:  # made anew it may have more
        if _PODS not in has:
            variables.append(has.setdefault(_PODS, {"name": _PODS}))
        has[_PODS]["value"] = str(recipe.pods)
    return result


def check_marked(template: Mapping[str, Any], annotations: Annotations, recipe: IdentityRecipe) -> None:
    """Raise `Refusal` (CopiedManifest) where a marked template's sidecar is not that of these annotations.

    An injected manifest that is copied (`kubectl get -o yaml`) brings the sidecar of the workload it was copied from,
    with its run, its policy and its owner. Where these are not what the copy's annotations and owner say, it would
    train under another name than its author reads, or into the run of another workload. What is as it was said is let
    through, since injection is asked again whenever another webhook changed something.

    Only what every version writes in the same way is compared; settings that a policy gives may have changed since.
    """
    sidecar = _sidecar(template)
    if sidecar is None:
        return  # which `inject` refuses
    if recipe.kind == "JobSet" and recipe.uid is not None and recipe.uid.text:
        raise Refusal(
            "Unsupported",
            "the JobSet controller writes no label jobset.sigs.k8s.io/jobset-uid",
            where="JobSet",
            remedy="upgrade it to 0.9 or newer",
        )
    has = {str(each.get("name")): _bare(each) for each in sidecar.get("env") or []}
    wants = {each["name"]: _bare(each) for each in run_identity.environment(recipe, annotations.run_id)}
    for name in _IDENTITY:
        if name in has and name in wants and has[name] != wants[name]:
            raise _copied(INJECTED, "its sidecar was put in for another workload, or for one of another kind")
    if (runs := has.get("DELTASHARD_RUNS", {}).get("value", "")) != (annotations.runs or ""):
        raise _copied(RUNS, f"the sidecar that is in it already has DELTASHARD_RUNS={runs[:80]!r}")
    source = sidecar_container.restore_from(annotations.restore_from or "")
    if has.get("DELTASHARD_RESTORE_FROM", {}).get("value", "") != source:
        raise _copied(RESTORE_FROM, "the sidecar that is in it already begins its run otherwise")
    pods = has.get(_PODS, {}).get("value", "")
    if recipe.kind != "JobSet" and pods != str(recipe.pods or ""):
        raise _copied(
            INJECTED,
            f"the sidecar that is in it already was put in for {pods or 'an unknown number of'} pods",
        )
    for name, key, want in _settings(annotations, wants):
        value = has.get(name, {}).get("value")
        if value is not None and value != want:
            raise _copied(key, f"the sidecar that is in it already has {name}={value[:80]!r}, not {want!r}")


def _settings(annotations: Annotations, wants: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(variable, annotation, value) of each setting that the annotations decide alone."""
    settings = [
        ("DELTASHARD_POLICY", POLICY, annotations.policy),
        ("DELTASHARD_RUN_ID", RUN_ID, str(wants["DELTASHARD_RUN_ID"]["value"])),
    ]
    if annotations.every_s:
        settings.append(("DELTASHARD_EVERY_S", INTERVAL, seconds(annotations.every_s)))
    if annotations.encoding is not None:
        settings.append(("DELTASHARD_ENCODING", ENCODING, annotations.encoding))
    if annotations.arena_bytes is not None:
        settings.append(("DELTASHARD_ARENA_BYTES", ARENA_SIZE, str(whole_blocks(annotations.arena_bytes))))
    return settings


def _bare(variable: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in variable.items() if value}


def _copied(where: str, what: str) -> Refusal:
    return Refusal(
        "CopiedManifest",
        f"the manifest was copied from an injected one, and {what}",
        where=where,
        remedy=f"take the container {SIDECAR}, the volumes deltashard-* and the annotation {INJECTED} out of it",
    )


def labelled(metadata: Mapping[str, Any]) -> Document:
    """Object metadata with the managed-by label, by which the controller finds its workloads."""
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


def _trainer(spec: Mapping[str, Any], name: str | None) -> Document:
    containers: list[Document] = spec.get("containers") or []
    if name is None:
        return next((each for each in containers if not is_mesh_proxy(each.get("name"))), containers[0])
    for container in containers:
        if container.get("name") == name:
            return container
    raise Refusal(
        "BadAnnotation",
        f"the pod has no container {name!r}",
        where="deltashard.io/container",
        remedy=f"it takes one of {', '.join(str(each.get('name')) for each in containers)}",
    )


def _default_container(template: Mapping[str, Any]) -> str | None:
    """The pod's main container where it says which one is: Argo's pods do, whose first is not."""
    notes = (template.get("metadata") or {}).get("annotations") or {}
    name = notes.get(DEFAULT_CONTAINER)
    named = any(each.get("name") == name for each in template["spec"]["containers"])
    return name if named and not is_mesh_proxy(name) else None


def group_of(spec: Mapping[str, Any]) -> int:
    """The group that shares the arena: the pod's first supplemental group, else its fsGroup, else ours."""
    context = spec.get("securityContext") or {}
    groups = context.get("supplementalGroups")
    if groups:
        return int(groups[0])
    return int(context.get("fsGroup", USER_ID))


def _share_group(spec: Document) -> None:
    context = spec.get("securityContext") or {}
    if not context.get("supplementalGroups") and "fsGroup" not in context:
        spec["securityContext"] = {**context, "supplementalGroups": [USER_ID]}


def _grace_s(spec: Mapping[str, Any], policy: Policy, *, keep: bool) -> int:
    stated = spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    if stated == DEFAULT_GRACE_S and not keep:
        return policy.grace_s
    return int(stated)


def metrics_port(spec: Mapping[str, Any], policy: Policy) -> int:
    """Port of the sidecar's metrics in this pod; 0 (off) where another container declares it."""
    port = policy.host_network_metrics_port if spec.get("hostNetwork") else policy.metrics_port
    declared = {
        each.get("containerPort")
        for key in ("containers", "initContainers")
        for container in spec.get(key) or []
        for each in container.get("ports") or []
    }
    return 0 if port in declared else port


def _join(trainer: Document) -> None:
    """Give the training container the shared volume and the socket's path."""
    mounts = trainer.get("volumeMounts") or []
    for each in mounts:
        if str(each.get("mountPath", "")).rstrip("/") == SHM_PATH:
            if each.get("name") != SHM_VOLUME or each.get("readOnly") or each.get("subPath"):
                raise Refusal(
                    "MountTaken",
                    f"volume {each.get('name')!r} is mounted at {SHM_PATH}",
                    where=f"container {trainer.get('name')}",
                    remedy=f"mount it elsewhere; {SHM_PATH} is where the sidecar and the trainer meet",
                )
            break
    else:
        trainer["volumeMounts"] = [*mounts, {"name": SHM_VOLUME, "mountPath": SHM_PATH}]
    variables = trainer.get("env") or []
    for each in variables:
        if each.get("name") == SOCKET_VARIABLE:
            if each.get("value") != SOCKET_PATH:
                raise Refusal(
                    "VariableTaken",
                    f"{SOCKET_VARIABLE} is set to another value than {SOCKET_PATH}",
                    where=f"container {trainer.get('name')}",
                    remedy="remove it",
                )
            return
    trainer["env"] = [*variables, {"name": SOCKET_VARIABLE, "value": SOCKET_PATH}]


def _position(inits: list[Document]) -> int:
    """Index of the sidecar among the init containers: first, but behind the meshes' own native sidecars."""
    return max((n for n, each in enumerate(inits, 1) if is_mesh_proxy(each.get("name"))), default=0)


def _add_named(spec: Document, key: str, wanted: tuple[Document, ...]) -> None:
    present = spec.get(key) or []
    names = {each.get("name") for each in present}
    missing = [copy.deepcopy(each) for each in wanted if each["name"] not in names]
    if missing:
        spec[key] = [*present, *missing]
