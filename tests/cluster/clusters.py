"""A whole Kubernetes on one machine, from binaries, in seconds.

It is etcd, apiserver, controller-manager, scheduler, kube-proxy, and nodes. Everything listens on loopback or on the bridge; everything is ended by pid; the host is put back.

One cluster at a time: paths and addresses are fixed. What an earlier run left (it was killed) is cleaned up first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import urllib3

from tests.cluster.apis import Api
from tests.cluster.certificates import Authority
from tests.cluster.hosts import HOST_ADDRESS, NETWORK, SERVICES, Host
from tests.cluster.nodes import CNI_BINARIES, Node, shims_of, write_network
from tests.cluster.processes import ClusterError, Ledger, Server, wait_until
from tests.minio import ROOT, free_port

FOLDER = Path("/var/lib/deltashard-cluster")
SERVER = f"https://{HOST_ADDRESS}:6443"
PROGRAMS = ("containerd", "runc", "ctr", "iptables", "ip")
PACKAGES = ("containerd", "runc", "containernetworking-plugins", "iptables", "iproute2")


def missing() -> list[str]:
    """Why no cluster can run here; empty when one can."""
    lacks = [] if os.geteuid() == 0 else ["root"]
    lacks += [f"the program {name}" for name in PROGRAMS if shutil.which(name) is None]
    if not Path(CNI_BINARIES, "bridge").exists():
        lacks.append(f"the CNI plugins in {CNI_BINARIES}")
    if lacks and lacks != ["root"]:
        lacks.append(f"(Debian: apt-get install {' '.join(PACKAGES)})")
    return lacks


def tool(name: str) -> Path:
    """Path that `tools/build` prints, built when missing (minutes, once per machine)."""
    try:
        done = subprocess.run(
            [str(ROOT / "tools" / "build"), name], check=True, capture_output=True, text=True, timeout=3000
        )
    except subprocess.CalledProcessError as error:
        raise ClusterError(error.stderr.strip()) from None
    return Path(done.stdout.strip().splitlines()[-1])


class Cluster:
    """The control plane and its nodes, between `up` and `down`."""

    def __init__(self, nodes: Sequence[str] = ("n1", "n2")) -> None:
        self._names = nodes
        self.nodes: dict[str, Node] = {}
        self.servers: list[Server] = []
        self.timings_s: dict[str, float] = {}
        self.api: Api
        self.kubeconfig = FOLDER / "certificates" / "admin.kubeconfig"

    def up(self, images: Sequence[Path]) -> None:
        """Start everything; returns when every node is Ready and pods can be created."""
        etcd, kubernetes = tool("etcd"), tool("kubernetes")
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(FOLDER.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ClusterError("another test run has its cluster up on this machine") from None
        clean_up()
        FOLDER.mkdir(parents=True)
        began_s = time.monotonic()
        self._host, self._ledger = Host(FOLDER), Ledger(FOLDER / "processes.jsonl")
        addresses = [f"{NETWORK}.{number + 2}" for number in range(len(self._names))]
        self._host.prepare(addresses)
        self._authority = Authority(FOLDER / "certificates")
        admin = self._authority.issue("admin", user="admin", group="system:masters")
        self._authority.kubeconfig("admin", server=SERVER, user="admin", group="system:masters")
        self.api = Api(SERVER, ca=self._authority.file, certificate=admin)
        write_network(FOLDER / "network")
        for name, address in zip(self._names, addresses, strict=True):
            node = Node(
                name, address, folder=FOLDER, network=FOLDER / "network", ledger=self._ledger, host=self._host
            )
            node.prepare(
                self._authority, server=SERVER, kubelet=kubernetes / "kubelet", health_port=free_port()
            )
            self.nodes[name] = node
        self._start_store(etcd)
        self._serve("kube-apiserver", kubernetes, self._apiserver_flags())
        for node in self.nodes.values():
            node.start_runtime(images)
        self.servers[-1].wait_ready(self.api.ready, timeout_s=90)
        self.timings_s["apiserver ready"] = time.monotonic() - began_s
        self._serve("kube-controller-manager", kubernetes, self._controller_flags())
        self._serve("kube-scheduler", kubernetes, self._scheduler_flags())
        self._serve("kube-proxy", kubernetes, self._proxy_flags())
        for node in self.nodes.values():
            node.kubelet.start()
        self._wait_nodes()
        wait_until(
            lambda: self.api.find("/api/v1/namespaces/default/serviceaccounts/default"),
            timeout_s=60,
            what="the default service account",
        )
        self.timings_s["nodes ready"] = time.monotonic() - began_s

    def remember(self, name: str, pid: int) -> None:
        """A process of the test's own that must end with the cluster, also when the test is killed."""
        self._ledger.add(name, pid)

    def _wait_nodes(self) -> None:
        def ready() -> bool:
            for server in (*self.servers, *(node.kubelet for node in self.nodes.values())):
                if not server.alive:
                    raise ClusterError(f"{server.name} ended:\n{server.tail()}")
            return all(self.node_ready(name) for name in self._names)

        wait_until(
            ready,
            timeout_s=90,
            what=lambda: "every node Ready\n" + "\n".join(n.kubelet.tail(1500) for n in self.nodes.values()),
        )

    def node_ready(self, name: str) -> bool:
        """Whether the control plane holds the node for Ready."""
        found = self.api.find(f"/api/v1/nodes/{name}")
        conditions = found["status"].get("conditions", ()) if found else ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def _serve(self, name: str, folder: Path, flags: Sequence[str]) -> None:
        server = Server(name, [folder / name, *flags], folder=FOLDER, ledger=self._ledger)
        server.start()
        self.servers.append(server)

    def _start_store(self, binary: Path) -> None:
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._etcd_url = client
        server = Server(
            "etcd",
            [
                binary, f"--data-dir={FOLDER / 'etcd'}", "--name=node0", f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=node0={peer}",
                "--unsafe-no-fsync", "--log-level=warn",
            ],
            folder=FOLDER,
            ledger=self._ledger,
        )  # fmt: skip
        server.start()
        self.servers.append(server)
        with urllib3.PoolManager(retries=False, timeout=2) as http:

            def healthy() -> bool:
                try:
                    return http.request("GET", f"{client}/health").status == 200
                except urllib3.exceptions.HTTPError:
                    return False

            server.wait_ready(healthy)

    def _apiserver_flags(self) -> list[str]:
        issue = self._authority.issue
        names = [
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        ]
        serving = issue(
            "apiserver", user="kube-apiserver", alternatives=["127.0.0.1", HOST_ADDRESS, "10.96.0.1", *names]
        )
        kubelets = issue("apiserver-kubelets", user="kube-apiserver", group="system:masters")
        front = issue("front-proxy", user="front-proxy")
        public, private = self._authority.account_keys()
        ca = self._authority.file
        return [
            f"--etcd-servers={self._etcd_url}", f"--bind-address={HOST_ADDRESS}",
            f"--advertise-address={HOST_ADDRESS}", "--secure-port=6443",
            f"--tls-cert-file={serving[0]}", f"--tls-private-key-file={serving[1]}", f"--client-ca-file={ca}",
            f"--service-account-key-file={public}", f"--service-account-signing-key-file={private}",
            "--service-account-issuer=https://kubernetes.default.svc", "--allow-privileged",
            f"--service-cluster-ip-range={SERVICES}", f"--kubelet-client-certificate={kubelets[0]}",
            f"--kubelet-client-key={kubelets[1]}", f"--kubelet-certificate-authority={ca}",
            "--kubelet-preferred-address-types=InternalIP", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction", "--enable-aggregator-routing=true",
            "--shutdown-delay-duration=0s", f"--requestheader-client-ca-file={ca}",
            "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-", "--requestheader-allowed-names=front-proxy",
            f"--proxy-client-cert-file={front[0]}", f"--proxy-client-key-file={front[1]}",
        ]  # fmt: skip

    def _config(self, name: str) -> Path:
        return self._authority.kubeconfig(name, server=SERVER, user=f"system:{name}")

    def _controller_flags(self) -> list[str]:
        ca, key = self._authority.file, self._authority.key_file
        return [
            f"--kubeconfig={self._config('kube-controller-manager')}", "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}", f"--cert-dir={FOLDER / 'controller-manager'}",
            "--use-service-account-credentials", f"--root-ca-file={ca}",
            f"--service-account-private-key-file={self._authority.folder / 'accounts.key'}",
            f"--cluster-signing-cert-file={ca}", f"--cluster-signing-key-file={key}", "--leader-elect=false",
            "--node-monitor-period=1s", "--node-monitor-grace-period=6s", "--kube-api-qps=200",
            "--kube-api-burst=400",
        ]  # fmt: skip

    def _scheduler_flags(self) -> list[str]:
        return [
            f"--kubeconfig={self._config('kube-scheduler')}", "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}", f"--cert-dir={FOLDER / 'scheduler'}", "--leader-elect=false",
        ]  # fmt: skip

    def _proxy_flags(self) -> list[str]:
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(self._config("kube-proxy"))},
            "mode": "iptables",
            "bindAddress": HOST_ADDRESS,
            "clusterCIDR": f"{NETWORK}.0/24",
            "hostnameOverride": self._names[0],
            "healthzBindAddress": f"127.0.0.1:{free_port()}",
            "metricsBindAddress": f"127.0.0.1:{free_port()}",
            "nodePortAddresses": ["127.0.0.0/8"],
            "iptables": {
                "masqueradeAll": True,
                "localhostNodePorts": False,
                "minSyncPeriod": "100ms",
                "syncPeriod": "30s",
            },
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
        path = FOLDER / "kube-proxy.json"
        path.write_text(json.dumps(config))
        return [f"--config={path}"]

    def down(self) -> list[str]:
        """End everything; returns what could not be put back (empty is well)."""
        with contextlib.suppress(AttributeError):
            self.api.close()
        for node in self.nodes.values():
            with contextlib.suppress(AttributeError):
                node.stop()
        for server in reversed(self.servers):
            server.stop()
        left = clean_up()
        os.close(self._lock)
        FOLDER.with_suffix(".lock").unlink(missing_ok=True)
        return left


def clean_up() -> list[str]:
    """End and undo what the record of a cluster on this machine names; returns what is left all the same."""
    if not FOLDER.exists():
        return []
    Ledger(FOLDER / "processes.jsonl").end_all()
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
