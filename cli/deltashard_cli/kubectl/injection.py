"""Preview of injection: the cluster's answer to a dry run, overlaid on the manifest of a file.

The API server calls the installed webhook with the existing policies, so that no second implementation can differ. Only
pod specs, labels and annotations that injection writes are copied from the answer: the API server's own defaults (such
as a Job's selector) would make the manifest unusable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deltashard_checkpoint.errors import UserError

from deltashard_cli.kubectl.cluster import Cluster

POLICY = "deltashard.io/policy"
INJECTED = "deltashard.io/injected"
OWN_PREFIXES = ("deltashard.io/", "cluster-autoscaler.kubernetes.io/", "backup.velero.io/")
RUNTIMES = frozenset({"TrainingRuntime", "ClusterTrainingRuntime"})
Document = dict[str, Any]


def injected(cluster: Cluster, document: Document) -> Document:
    """Return the manifest with its sidecar, or unchanged without the policy annotation.

    Raises `UserError` if the webhook does not inject an annotated manifest.
    """
    if POLICY not in set(_keys(document)):
        return document
    asked = _jobset(document) if document.get("kind") in RUNTIMES else document
    answer = cluster.create(_path(cluster, asked), asked, {"dryRun": "All"})
    if INJECTED not in set(_keys(answer)):
        raise UserError(
            "it has the policy annotation, but deltashard does not inject this kind directly",
            where=_describe(document),
            remedy="StatefulSets and CronJobs are injected when their pods or Jobs are created: use one of those",
        )
    found: Document = overlay(
        document, answer if asked is document else {"spec": {"template": {"spec": answer["spec"]}}}
    )
    return found


def _jobset(runtime: Document) -> Document:
    """Return the JobSet that a TrainJob's runtime creates, as far as injection needs it."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"generateName": "runtime-", "namespace": runtime["metadata"].get("namespace")},
        "spec": runtime["spec"]["template"]["spec"],
    }


def overlay(manifest: Any, answer_part: Any) -> Any:
    """Return a part of the manifest with the answer's pod specs and deltashard's labels and annotations."""
    if isinstance(manifest, list) and isinstance(answer_part, list) and len(manifest) == len(answer_part):
        return [overlay(*each) for each in zip(manifest, answer_part, strict=True)]
    if not isinstance(manifest, dict) or not isinstance(answer_part, dict):
        return manifest
    if "containers" in manifest:
        return answer_part
    found = {key: overlay(value, answer_part.get(key, value)) for key, value in manifest.items()}
    if "spec" in manifest and "metadata" not in manifest:  # a template without metadata
        found = {"metadata": overlay({}, answer_part.get("metadata")), **found}
    for key in ("labels", "annotations"):
        ours = {
            name: value
            for name, value in (answer_part.get(key) or {}).items()
            if name.startswith(OWN_PREFIXES)
        }
        if ours:
            found[key] = {**(manifest.get(key) or {}), **ours}
    return found


def _keys(part: Any) -> Iterator[str]:
    for each in part if isinstance(part, list) else []:
        yield from _keys(each)
    for key, value in part.items() if isinstance(part, dict) else []:
        yield key
        yield from _keys(value)


def _describe(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata") or {}
    return f"{document.get('kind')} {metadata.get('name') or metadata.get('generateName')}"


def _path(cluster: Cluster, document: Document) -> str:
    """Return the API path for creating objects of the document's kind, from API discovery."""
    version, kind = str(document.get("apiVersion", "")), document.get("kind")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    for each in cluster.get(root).get("resources") or ():
        if each["kind"] == kind and "/" not in each["name"]:
            namespace = (document.get("metadata") or {}).get("namespace") or cluster.namespace
            place = f"/namespaces/{namespace}" if each["namespaced"] else ""
            return f"{root}{place}/{each['name']}"
    raise UserError("the cluster has no such kind", where=f"{version} {kind}")
