"""A whole Kubernetes on one machine, from binaries, in seconds.

It consists of etcd, apiserver, controller-manager, scheduler, kube-proxy, DNS, and nodes. Every server listens on
loopback or on the bridge; every process is ended by pid; the host is restored.

Only one cluster runs at a time: paths and addresses are fixed. The start first cleans up after an earlier run that
was killed. The process that called `up` calls `down`; other processes `attach`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import urllib3

from tests.cluster.kubernetes import flag
from tests.cluster.kubernetes.api import KubeApi
from tests.cluster.kubernetes.certificate import ClusterAuthority
from tests.cluster.kubernetes.flag import SERVER
from tests.cluster.kubernetes.host import NETWORK, Host
from tests.cluster.kubernetes.node import CNI_BINARIES, Node, shims_of, write_network
from tests.cluster.kubernetes.process import ClusterError, ProcessLedger, ServerProcess, run, wait_until
from tests.support import tool
from tests.support.server.port import free_port

FOLDER = Path("/var/lib/deltashard-cluster")
PROGRAMS = ("containerd", "runc", "ctr", "iptables", "ip")
PACKAGES = ("containerd", "runc", "containernetworking-plugins", "iptables", "iproute2")
NODES = ("n1", "n2", "m1", "m2")
"""Nodes whose names begin with m are for scenarios that stop nodes: only pods that request them run there."""
UNRELIABLE = "unreliable"
"""Pool of the nodes whose names begin with m."""
TOOLS = (
    "minio",
    "etcd",
    "kubernetes",
    "kubectl",
    "coredns",
    "helm",
    "jobset",
    "kueue",
    "training-operator",
    "kubeflow-trainer",
)


def missing() -> list[str]:
    """Return the requirements that this machine lacks; empty when a cluster can run."""
    lacks = [] if os.geteuid() == 0 else ["root"]
    lacks += [f"the program {name}" for name in PROGRAMS if shutil.which(name) is None]
    if not Path(CNI_BINARIES, "bridge").exists():
        lacks.append(f"the CNI plugins in {CNI_BINARIES}")
    if lacks and lacks != ["root"]:
        lacks.append(f"(Debian: apt-get install {' '.join(PACKAGES)})")
    lacks += [f"{name} (`make servers` builds it)" for name in TOOLS if tool.found(name) is None]
    return lacks


class LocalCluster:
    """The control plane and its nodes."""

    def __init__(self) -> None:
        self.kubeconfig = FOLDER / "certificates" / "admin.kubeconfig"
        self.audit_log = FOLDER / flag.AUDIT_LOG
        self.timings_s: dict[str, float] = {}
        self.api: KubeApi
        self._servers: list[ServerProcess] = []
        self._lock: int | None = None
        self._host, self._ledger = Host(FOLDER), ProcessLedger(FOLDER / "processes.jsonl")
        self.nodes = {
            name: Node(
                name,
                f"{NETWORK}{number + 2}",
                folder=FOLDER,
                network=FOLDER / "network",
                ledger=self._ledger,
                host=self._host,
                pool=UNRELIABLE if name.startswith("m") else "",
            )
            for number, name in enumerate(NODES)
        }

    def attach(self) -> None:
        """Use the cluster that another test process started."""
        certificates = FOLDER / "certificates"
        admin = certificates / "admin.crt", certificates / "admin.key"
        self.api = KubeApi(SERVER, ca=certificates / "ca.crt", certificate=admin)
        for node in self.nodes.values():
            node.attach()

    def up(self, images: Sequence[Path]) -> None:
        """Start every component; return when every node is Ready and pods can be created."""
        etcd, kubernetes, coredns = (
            tool.require_tool("etcd"),
            tool.require_tool("kubernetes"),
            tool.require_tool("coredns"),
        )
        FOLDER.mkdir(parents=True, exist_ok=True)
        lock = os.open(FOLDER.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ClusterError("another test run has its cluster up on this machine") from None
        self._lock = lock
        clean_up()
        FOLDER.mkdir(parents=True)
        began_s = time.monotonic()
        self._host.prepare([node.address for node in self.nodes.values()])
        authority = ClusterAuthority(FOLDER / "certificates")
        authority.issue("admin", user="admin", group="system:masters")
        authority.kubeconfig("admin", server=SERVER, user="admin", group="system:masters")
        write_network(FOLDER / "network")
        for node in self.nodes.values():
            node.prepare(authority, server=SERVER, kubelet=kubernetes / "kubelet")
        self.attach()
        url = f"http://127.0.0.1:{free_port()}"
        self._serve("etcd", etcd, flag.etcd(FOLDER, url))
        self._wait_healthy(f"{url}/health")
        self._serve("kube-apiserver", kubernetes, flag.apiserver(FOLDER, authority, url))
        for node in self.nodes.values():
            node.start_runtime(images)
        self._servers[-1].wait_ready(self.api.ready, timeout_s=90)
        self.timings_s["apiserver ready"] = time.monotonic() - began_s
        self._serve("kube-controller-manager", kubernetes, flag.controller_manager(FOLDER, authority))
        self._serve("kube-scheduler", kubernetes, flag.scheduler(FOLDER, authority))
        self._serve("kube-proxy", kubernetes, flag.proxy(FOLDER, authority, list(self.nodes)))
        flags, ready = flag.dns(FOLDER, self.kubeconfig)
        self._serve("coredns", coredns, flags)
        self._wait_healthy(ready)
        for node in self.nodes.values():
            # One after the other: each takes /var/lib/kubelet/device-plugins/kubelet.sock from the one before.
            node.kubelet.start()
            self._wait_node(node)
        wait_until(
            lambda: self.api.find("/api/v1/namespaces/default/serviceaccounts/default"),
            timeout_s=60,
            what="the default service account",
        )
        self.timings_s["nodes ready"] = time.monotonic() - began_s

    def register_process(self, name: str, pid: int) -> None:
        """Register a process of the test that must end with the cluster, even if the test is killed."""
        self._ledger.add(name, pid)

    def kubectl(self, *arguments: str | Path, check: bool = True, timeout_s: float = 120.0) -> str:
        """Run kubectl as a user of the cluster does; return its output, or raise `ClusterError` with its message."""
        return run(
            tool.require_tool("kubectl"),
            f"--kubeconfig={self.kubeconfig}",
            *arguments,
            check=check,
            timeout_s=timeout_s,
        )

    def _wait_node(self, node: Node) -> None:
        def ready() -> bool:
            for server in (*self._servers, node.kubelet):
                if not server.alive:
                    raise ClusterError(f"{server.name} ended:\n{server.tail()}")
            return self.node_ready(node.name)

        wait_until(ready, timeout_s=120, what=lambda: f"node {node.name} Ready\n{node.kubelet.tail()}")

    def node_ready(self, name: str) -> bool:
        found = self.api.find(f"/api/v1/nodes/{name}")
        conditions = found["status"].get("conditions", ()) if found else ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def wait_node(self, name: str) -> None:
        wait_until(lambda: self.node_ready(name), timeout_s=90, what=f"node {name} Ready again")

    def _serve(self, name: str, binary: Path, flags: Sequence[str]) -> None:
        program = binary / name if binary.is_dir() else binary
        server = ServerProcess(name, [program, *flags], folder=FOLDER, ledger=self._ledger)
        server.start()
        self._servers.append(server)

    def _wait_healthy(self, url: str) -> None:
        with urllib3.PoolManager(retries=False, timeout=2) as http:

            def healthy() -> bool:
                try:
                    return http.request("GET", url).status == 200
                except urllib3.exceptions.HTTPError:
                    return False

            self._servers[-1].wait_ready(healthy)

    def down(self) -> list[str]:
        """End every process; return what could not be restored (empty on success)."""
        if self._lock is None:  # the record belongs to another test run
            return []
        with contextlib.suppress(AttributeError):
            self.api.close()
        for node in self.nodes.values():
            with contextlib.suppress(AttributeError):  # the start did not get this far
                node.stop()
        for server in reversed(self._servers):
            server.stop()
        left = clean_up()
        os.close(self._lock)
        FOLDER.with_suffix(".lock").unlink(missing_ok=True)
        return left


def clean_up() -> list[str]:
    """End and undo what the record of a cluster on this machine names; return what remains."""
    if not FOLDER.exists():
        return []
    ProcessLedger(FOLDER / "processes.jsonl").end_all()
    host = Host(FOLDER)
    for pid, started in shims_of(FOLDER):
        if started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    for cgroup in {path.name for path in Path("/sys/fs/cgroup").glob("**/dsk-n*") if path.is_dir()}:
        host.remove_cgroup(cgroup)
    host.unmount()
    left = host.restore()
    shutil.rmtree(FOLDER, ignore_errors=True)
    return left + ([str(FOLDER)] if FOLDER.exists() else [])
