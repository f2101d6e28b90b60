"""A Hypothesis strategy for valid and invalid pod templates.

A real API server admits most of the templates. The rest does not test injection. `MAX` bounds keep one template small.
Together the templates cover every rule of injection: QoS classes, pod-level resources, declared volumes, groups,
host networks, meshes, own init containers and native sidecars, ports, taken names, grace periods.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["worker", "a", "b-1", "istio-proxy", "logger"])
RARELY = st.integers(0, 9).map(lambda n: n == 7)
"""Not zero, because Hypothesis prefers zero."""
VOLUME_NAMES = ["data", "deltashard-cache", "scratch"]
TAKEN = ["deltashard-shm", "deltashard-store", "deltashard-token"]
CPU = st.sampled_from(["100m", "1", "2", "1500m", "0.5"])
MEMORY = st.sampled_from(["64Mi", "1Gi", "2G", "1536Mi", "4Gi", "1e9"])
STORAGE = st.sampled_from(["1Gi", "20Gi"])
SMALL_TEXT = st.text(alphabet="abc$()/ é'\"\\{}", max_size=12)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


AMOUNTS = optional(cpu=CPU, memory=MEMORY, **{"ephemeral-storage": STORAGE})
EQUAL = st.fixed_dictionaries({"cpu": CPU, "memory": MEMORY}).map(lambda r: {"requests": r, "limits": r})
LIMITS_ONLY = st.fixed_dictionaries({"cpu": CPU, "memory": MEMORY}).map(lambda r: {"limits": r})
RESOURCES = st.one_of(EQUAL, LIMITS_ONLY, AMOUNTS.map(lambda r: {"requests": r}), st.just({}))
POD_RESOURCES = st.one_of(EQUAL, LIMITS_ONLY, optional(requests=optional(cpu=CPU, memory=MEMORY)))
SECURITY = optional(
    runAsUser=st.sampled_from([0, 1000, 65532]),
    runAsNonRoot=st.booleans(),
    readOnlyRootFilesystem=st.booleans(),
    allowPrivilegeEscalation=st.just(False),
    capabilities=st.just({"drop": ["ALL"]}),
)
POD_SECURITY = optional(
    runAsUser=st.sampled_from([0, 1000]),
    runAsGroup=st.sampled_from([0, 1000]),
    fsGroup=st.sampled_from([0, 2000]),
    supplementalGroups=st.lists(st.sampled_from([0, 42, 4242]), max_size=2, unique=True),
    seccompProfile=st.just({"type": "RuntimeDefault"}),
    supplementalGroupsPolicy=st.sampled_from(["Merge", "Strict"]),
)
MOUNT_PATHS = [
    "/data",
    "/tmp",
    "/var/cache/deltashard",
    "/models",
    "/x",
    "/run/deltashard",
    "/run/deltashard/",
]
PORT = st.fixed_dictionaries(
    {"containerPort": st.sampled_from([80, 24464, 8080])},
    optional={"name": st.sampled_from(["web", "deltashard"])},
)
ENV = st.lists(
    st.one_of(
        st.fixed_dictionaries({"name": st.sampled_from(["A", "LR", "HOME"]), "value": SMALL_TEXT}),
        st.sampled_from([*["/run/deltashard/sidecar.sock"] * 3, "/elsewhere"]).map(
            lambda value: {"name": "DELTASHARD_SOCKET", "value": value}
        ),
    ),
    max_size=2,
)
PROBE = st.just({"exec": {"command": ["true"]}})


@st.composite
def containers(draw: st.DrawFn, name: str, volumes: list[str], *, init: bool) -> dict[str, Any]:
    """Draw one container. An init container may be a native sidecar."""
    container = {
        "name": name,
        "image": draw(st.sampled_from(["train:1", "registry.example/x@sha256:" + "0" * 64])),
    }
    container |= draw(
        optional(
            resources=RESOURCES,
            securityContext=SECURITY,
            env=ENV,
            ports=st.lists(PORT, max_size=1),
            command=st.lists(SMALL_TEXT.filter(bool), min_size=1, max_size=2),
            imagePullPolicy=st.sampled_from(["Always", "Never"]),
        )
    )
    mounts = draw(st.lists(st.sampled_from(MOUNT_PATHS), max_size=2, unique=True)) if volumes else []
    if mounts:
        container["volumeMounts"] = [
            {"name": draw(st.sampled_from(volumes)), "mountPath": path, "readOnly": draw(st.booleans())}
            for path in mounts
        ]
    if init and draw(st.booleans()):
        container["restartPolicy"] = "Always"
        if draw(st.booleans()):
            container["startupProbe"] = draw(PROBE)
    return container


def _source(name: str) -> st.SearchStrategy[dict[str, Any]]:
    memory = optional(sizeLimit=st.sampled_from(["2Gi", "1040Mi", "272Mi", "100Mi"])).map(
        lambda e: {"medium": "Memory", **e}
    )
    disk = optional(sizeLimit=st.sampled_from(["1Gi", "50Gi"]))
    others = st.sampled_from(
        [
            {"hostPath": {"path": "/data"}},
            {"secret": {"secretName": "s"}},
            {"configMap": {"name": "c", "optional": True}},
            {"persistentVolumeClaim": {"claimName": "claim"}},
        ]
    )
    directories = st.one_of(memory, disk).map(lambda e: {"emptyDir": e})
    usual = disk.map(lambda e: {"emptyDir": e})
    return st.one_of(usual, usual, usual, directories, others) if name.startswith("deltashard-") else others


@st.composite
def pod_templates(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a Job's pod template with `metadata` and `spec`."""
    volumes = draw(st.lists(st.sampled_from(VOLUME_NAMES), max_size=3, unique=True))
    if draw(RARELY):
        volumes.append(draw(st.sampled_from(TAKEN)))
    names = ["trainer", *draw(st.lists(NAMES, max_size=3, unique=True))]
    split = draw(st.integers(1, len(names)))
    spec: dict[str, Any] = {
        "restartPolicy": draw(st.sampled_from(["Never", "OnFailure"])),
        "containers": [draw(containers(n, volumes, init=False)) for n in names[:split]],
    }
    if names[split:]:
        spec["initContainers"] = [draw(containers(n, volumes, init=True)) for n in names[split:]]
    if volumes:
        spec["volumes"] = [{"name": n, **draw(_source(n))} for n in volumes]
    spec |= draw(
        optional(
            securityContext=POD_SECURITY,
            terminationGracePeriodSeconds=st.sampled_from([0, 1, 30, 31, 600]),
            hostNetwork=st.just(True),
            hostPID=st.just(True),
            shareProcessNamespace=st.just(True),
            imagePullSecrets=st.just([{"name": "pull"}]),
            nodeSelector=st.just({"kubernetes.io/arch": "amd64"}),
            priorityClassName=st.just(""),
            serviceAccountName=st.just("trainer"),
            automountServiceAccountToken=st.booleans(),
            enableServiceLinks=st.booleans(),
            tolerations=st.just([{"operator": "Exists"}]),
            dnsPolicy=st.sampled_from(["Default", "ClusterFirstWithHostNet"]),
            overhead=st.just({}),
            schedulingGates=st.just([]),
            activeDeadlineSeconds=st.just(3600),
        )
    )
    if draw(RARELY):
        spec["resources"] = draw(POD_RESOURCES)
    if draw(RARELY):
        spec["os"] = {"name": draw(st.sampled_from(["linux", "linux", "windows"]))}
    metadata = draw(
        optional(
            labels=st.dictionaries(
                st.sampled_from(["app", "deltashard.io/managed-by"]), st.just("x"), max_size=2
            ),
            annotations=st.dictionaries(
                st.sampled_from(["note", "sidecar.istio.io/inject"]), SMALL_TEXT, max_size=2
            ),
        )
    )
    return {"metadata": metadata, "spec": spec}


ANNOTATIONS = st.fixed_dictionaries(
    {"deltashard.io/policy": st.just("default")},
    optional={
        "deltashard.io/arena-size": st.sampled_from(["64Mi", "100Mi", "1Gi"]),
        "deltashard.io/interval": st.sampled_from(["0s", "90s", "5m"]),
        "deltashard.io/encoding": st.sampled_from(["q2", "q8", "fp32"]),
        "deltashard.io/run-id": st.just("nightly"),
        "deltashard.io/container": st.sampled_from(["trainer", "trainer", "trainer", "worker"]),
    },
)
POLICIES = optional(
    gracePeriod=st.sampled_from(["20s", "2m"]),
    cacheSize=st.sampled_from(["1Gi", "10Gi"]),
    sidecar=optional(
        runAsUser=st.sampled_from([None, 65532]),
        metricsPort=st.sampled_from([0, 24464]),
        hostNetworkMetricsPort=st.sampled_from([0, 19464]),
    ),
    store=st.sampled_from(
        [
            {"url": "s3://bucket"},
            {"url": "s3://bucket/p", "secretRef": {"name": "s"}, "region": "eu-1"},
            {"url": "s3://bucket", "webIdentity": {}},
        ]
    ),
)
