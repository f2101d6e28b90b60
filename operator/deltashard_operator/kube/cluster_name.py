"""Names that are visible in the cluster: annotations, labels, containers, volumes, paths.

The chart, the controller and the sidecar depend on them, and existing templates are immutable, so names must not
change.
"""

from __future__ import annotations

PREFIX = "deltashard.io/"
POLICY = PREFIX + "policy"
"""Annotation that enables a workload: a CheckpointPolicy of the namespace, `cluster/NAME`, or `default`."""
CONTAINER = PREFIX + "container"
RUN_ID = PREFIX + "run-id"
RUNS = PREFIX + "runs"
ARENA_SIZE = PREFIX + "arena-size"
INTERVAL = PREFIX + "interval"
GOAL = PREFIX + "goal"
ENCODING = PREFIX + "encoding"
PRECISION = PREFIX + "precision"
RESTORE_FROM = PREFIX + "restore-from"
INJECTED = PREFIX + "injected"
"""Marker on an injected template. Its value is the injecting version and is never compared."""
CHECKPOINT_TIME = PREFIX + "checkpoint-time"
"""Pod annotation with the commit time of the run's newest checkpoint, if the chart enables it."""
MANAGED_BY = PREFIX + "managed-by"
MANAGED_BY_VALUE = "deltashard"

WORKLOAD_UID = PREFIX + "workload-uid"
"""Label of a CheckpointRun with its workload's UID. Its label `deltashard.io/run-id` is the run's id."""

SIDECAR = "deltashard-sidecar"
MESH_PROXIES = frozenset(
    {"istio-proxy", "linkerd-proxy", "consul-dataplane", "consul-connect-envoy-sidecar", "kuma-sidecar"}
)
"""Proxy containers of service meshes."""
SHM_VOLUME = "deltashard-shm"
CACHE_VOLUME = "deltashard-cache"
STORE_VOLUME = "deltashard-store"
CA_VOLUME = "deltashard-ca"
TOKEN_VOLUME = "deltashard-token"  # noqa: S105 - a volume's name

SHM_PATH = "/run/deltashard"
CACHE_PATH = "/var/cache/deltashard"
STORE_PATH = "/etc/deltashard/store"
CA_PATH = "/etc/deltashard/ca"
TOKEN_PATH = "/var/run/secrets/deltashard"  # noqa: S105 - a path
SOCKET_PATH = SHM_PATH + "/sidecar.sock"
SOCKET_VARIABLE = "DELTASHARD_SOCKET"
FLEET_AUDIENCE = "deltashard-fleet"
METRICS_PORT = 24464
"""Port not used by known exporters: a pod's containers share their ports, and the sidecar starts first."""
METRICS_PORT_NAME = "deltashard"

USER_ID = 65532
"""User of the sidecar, and the group that shares the arena if the pod sets none."""

JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"
JOB_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
JOBSET_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
JOBSET_REPLICA_LABEL = "jobset.sigs.k8s.io/job-global-index"
JOBSET_REPLICAS_LABEL = "jobset.sigs.k8s.io/replicatedjob-replicas"
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"
EVICTABLE_VOLUMES = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
BACKUP_EXCLUDED_VOLUMES = "backup.velero.io/backup-volumes-excludes"
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
LEADER_WORKER_SET_LABEL = "leaderworkerset.sigs.k8s.io/name"
OS_LABEL = "kubernetes.io/os"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KUBEFLOW_REPLICA_LABEL = "training.kubeflow.org/replica-type"
KUBEFLOW_INDEX_LABEL = "training.kubeflow.org/replica-index"


def is_mesh_proxy(name: object) -> bool:
    """Return whether this is the name of a mesh proxy. Consul runs one per service of a pod."""
    return isinstance(name, str) and (name in MESH_PROXIES or name.startswith("consul-dataplane-"))
