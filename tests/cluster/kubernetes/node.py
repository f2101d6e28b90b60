"""A node: its own containerd and kubelet, with its own address on the bridge and its own cgroup.

All nodes share the host's network namespace. Two kubelets cannot share one containerd: each would kill the other's
pods as orphans. `freeze` stops a node and its containers without notice, like a hung machine. `thaw` continues the
containers first, so a zombie trainer runs at the same time as its replacement.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.kubernetes.certificate import ClusterAuthority
from tests.cluster.kubernetes.host import BRIDGE, HOST_ADDRESS, NETWORK, SERVICES, SUBNET, Host
from tests.cluster.kubernetes.image import PAUSE, base_spec
from tests.cluster.kubernetes.process import (
    ClusterError,
    ProcessLedger,
    ServerProcess,
    run,
    start_time,
    wait_until,
)
from tests.support.server.minio_server import free_port

CNI_BINARIES = "/usr/lib/cni"
POOL = "deltashard.test/pool"
"""Label and taint of nodes that accept only pods that request them."""


def write_network(folder: Path) -> None:
    """Write the pods' network: the bridge, addresses of one pool for all nodes, no default route."""
    folder.mkdir(parents=True, exist_ok=True)
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": False,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(folder / "addresses"),
            "ranges": [[{"subnet": SUBNET, "rangeStart": f"{NETWORK}10", "gateway": HOST_ADDRESS}]],
            "routes": [{"dst": SERVICES, "gw": HOST_ADDRESS}],
        },
    }
    config = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}
    (folder / "10-pods.conflist").write_text(json.dumps(config))


class Node:
    """One node; `start` after `stop` restores the same node."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        folder: Path,
        network: Path,
        ledger: ProcessLedger,
        host: Host,
        pool: str = "",
    ) -> None:
        self.name, self.address, self.pool = name, address, pool
        self.folder = folder / name
        self.cgroup = f"dsk-{name}"
        self._network, self._host, self._ledger = network, host, ledger
        self.socket = self.folder / "containerd.sock"
        self.logs = self.folder / "pods"
        self._frozen: list[tuple[int, str | None]] = []

    def prepare(self, authority: ClusterAuthority, *, server: str, kubelet: Path) -> None:
        self.folder.mkdir(parents=True)
        self._host.make_cgroup(self.cgroup)
        (self.folder / "spec.json").write_text(json.dumps(base_spec()))
        (self.folder / "containerd.toml").write_text(self._containerd_config())
        (self.folder / "resolv.conf").write_text("")
        certificate, key = authority.issue(
            f"{self.name}-serving", user=f"system:node:{self.name}", group="system:nodes",
            alternatives=[self.address, self.name],
        )  # fmt: skip
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "healthzPort": free_port(),
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "makeIPTablesUtilChains": False,
            "resolvConf": str(self.folder / "resolv.conf"),
            "clusterDNS": [HOST_ADDRESS],
            "clusterDomain": "cluster.local",
            "evictionHard": {"memory.available": "50Mi"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "1s",
            "syncFrequency": "10s",  # a changed Secret reaches its volume after this time instead of a minute
            "nodeLeaseDurationSeconds": 8,
            "podLogsDir": str(self.logs),
            "volumePluginDir": str(self.folder / "plugins"),
            "tlsCertFile": str(certificate),
            "tlsPrivateKeyFile": str(key),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority.file)},
            },
            "authorization": {"mode": "Webhook"},
        }
        if self.pool:
            taint = {"key": POOL, "value": self.pool, "effect": "NoSchedule"}
            config["registerWithTaints"] = [taint]
        (self.folder / "kubelet.json").write_text(json.dumps(config))
        kubeconfig = authority.kubeconfig(
            self.name, server=server, user=f"system:node:{self.name}", group="system:nodes"
        )
        commands = {
            "containerd": ["containerd", "--config", str(self.folder / "containerd.toml")],
            "kubelet": [
                str(kubelet), f"--config={self.folder / 'kubelet.json'}", f"--kubeconfig={kubeconfig}",
                f"--hostname-override={self.name}", f"--root-dir={self.folder / 'kubelet'}",
                f"--node-ip={self.address}", f"--cert-dir={self.folder / 'certificates'}",
                *([f"--node-labels={POOL}={self.pool}"] if self.pool else []),
            ],
        }  # fmt: skip
        (self.folder / "commands.json").write_text(json.dumps(commands))

    def attach(self) -> None:
        commands = json.loads((self.folder / "commands.json").read_text())
        self.containerd, self.kubelet = (
            ServerProcess(f"{self.name}-{name}", command, folder=self.folder, ledger=self._ledger)
            for name, command in commands.items()
        )

    def _containerd_config(self) -> str:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        return f"""version = 2
root = "{self.folder}/root"
state = "{self.folder}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.tracing.processor.v1.otlp"]
[grpc]
address = "{self.socket}"
[ttrpc]
address = "{self.socket}.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
path = "{self.folder}/opt"
[{cri}]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
disable_apparmor = true
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{self.folder}/spec.json"
[{cri}.containerd.runtimes.runc.options]
SystemdCgroup = false
Root = "{self.folder}/runc"
[{cri}.cni]
bin_dir = "{CNI_BINARIES}"
conf_dir = "{self._network}"
"""

    def ctr(self, *arguments: str | Path) -> str:
        return run("ctr", "--address", self.socket, "--namespace", "k8s.io", *arguments)

    def start_runtime(self, images: Sequence[Path]) -> None:
        self.containerd.start()
        self.containerd.wait_ready(lambda: self.socket.exists() and self._answers(), timeout_s=60)
        for image in images:
            self.ctr("images", "import", image)

    def _answers(self) -> bool:
        try:
            self.ctr("version")
        except ClusterError:
            return False
        return True

    def container_pid(self, container_id: str) -> int:
        """Return the host's process id of a container that a pod's status names (`containerd://...`)."""
        wanted = container_id.removeprefix("containerd://")
        for line in self.ctr("tasks", "list").splitlines()[1:]:
            found, pid, state = line.split()[:3]
            if found == wanted and state == "RUNNING":
                return int(pid)
        raise ClusterError(f"{self.name} runs no container {wanted}")

    def freeze(self) -> None:
        """Stop kubelet, containerd and every container without a signal that a process could handle."""
        self.kubelet.signal(signal.SIGSTOP)
        self.containerd.signal(signal.SIGSTOP)
        self._frozen = []
        for pid in self._host.processes_of(self.cgroup):
            self._frozen.append((pid, start_time(pid)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw_containers(self) -> None:
        """Continue the containers; no process supervises them yet."""
        for pid, started in self._frozen:
            if started is not None and start_time(pid) == started:
                os.kill(pid, signal.SIGCONT)
        self._frozen = []

    def thaw(self) -> None:
        self.thaw_containers()
        self.containerd.signal(signal.SIGCONT)
        self.kubelet.signal(signal.SIGCONT)

    def stop(self) -> None:
        """End kubelet, then every container with its shim, then containerd."""
        self.thaw()
        self.kubelet.stop()
        if self.containerd.alive:
            shims = self._shims()
            with contextlib.suppress(ClusterError):
                for line in self.ctr("tasks", "list").splitlines()[1:]:
                    self.ctr("tasks", "kill", "--signal", "SIGKILL", line.split()[0])
            self._host.remove_cgroup(self.cgroup)
            for pid, started in shims:
                if started is not None and start_time(pid) == started:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: all(start_time(pid) != started for pid, started in shims),
                timeout_s=10,
                what=f"shims of {self.name} ended",
            )
            self.containerd.stop()
        self._host.remove_cgroup(self.cgroup)

    def _shims(self) -> list[tuple[int, str | None]]:
        """Find the shims, which run detached and name this node's containerd on their command line."""
        return shims_of(self.socket)


def shims_of(marker: Path) -> list[tuple[int, str | None]]:
    """Return (pid, start time) of every containerd shim whose command line names `marker`, without its children."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"containerd-shim" in command[0] and any(each.startswith(bytes(marker)) for each in command):
                pid = int(process.name)
                found.append((pid, start_time(pid)))
    return found
