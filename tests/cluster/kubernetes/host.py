"""What a cluster changes on its host; `restore` undoes all of it.

The changes are a bridge with its addresses, a route, iptables rules, sysctls that kubelet and kube-proxy set,
cgroups, mounts, and folders whose paths Kubernetes hard-codes.

The pods' network is a separate bridge without a route out. The pods have no default route, only the bridge may
forward, and packets that leave it for another interface are dropped (an untranslated ClusterIP would otherwise follow
the host's default route). `restore` reads a file, so it also works for a test run that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.kubernetes.process import ClusterError, run

BRIDGE = "dsk0"
V6 = os.environ.get("DELTASHARD_TEST_CLUSTER_FAMILY") == "6"
"""Whether pods, Services and the API have only IPv6 addresses."""
NETWORK = "fd85::" if V6 else "10.85.0."
"""Prefix of every address of the bridge."""
PREFIX = 64 if V6 else 24
SUBNET = f"fd85::/{PREFIX}" if V6 else f"10.85.0.0/{PREFIX}"
HOST_ADDRESS = f"{NETWORK}1"
HOST = f"[{HOST_ADDRESS}]" if V6 else HOST_ADDRESS
"""The host's address as URLs contain it."""
SERVICES = "fd96::/112" if V6 else "10.96.0.0/16"
API_SERVICE = "fd96::1" if V6 else "10.96.0.1"
SYSCTLS = (
    "vm/overcommit_memory",
    "kernel/panic",
    "kernel/panic_on_oops",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/ip_forward",
    "net/ipv6/conf/all/forwarding",
)
"""Sysctls that kubelet and kube-proxy set."""
FOLDERS = ("/var/lib/kubelet", "/var/log/containers", "/var/log/pods", "/var/lib/cni", "/run/containerd")
"""Folders that kubelet, CNI and shims create at fixed paths; removed when they did not exist before."""
CGROUPS = Path("/sys/fs/cgroup")


class Host:
    """The changes and their reversal; `folder` keeps the record."""

    def __init__(self, folder: Path) -> None:
        self._record = folder / "host.json"
        self._folder = folder

    def prepare(self, addresses: Sequence[str]) -> None:
        """Create the bridge with its addresses, the route to services, and the rule that drops outgoing packets."""
        if Path("/sys/class/net", BRIDGE).exists():
            raise ClusterError(f"an interface {BRIDGE} exists and is not ours: ip link delete {BRIDGE}")
        record = {
            "sysctls": {name: Path("/proc/sys", name).read_text().strip() for name in SYSCTLS},
            "folders": [name for name in FOLDERS if not Path(name).exists()],
            "rules": sorted(_rules()),
        }
        self._record.write_text(json.dumps(record))
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        for address in (HOST_ADDRESS, *addresses):
            run("ip", "address", "add", f"{address}/{PREFIX}", "dev", BRIDGE, *(["nodad"] if V6 else []))
        run("ip", "link", "set", BRIDGE, "up")
        run("ip", "route", "add", SERVICES, "dev", BRIDGE)
        for family in ("ipv4", "ipv6"):
            Path(f"/proc/sys/net/{family}/conf/{BRIDGE}/forwarding").write_text("1")
        drop = f"-w -I FORWARD -i {BRIDGE} ! -o {BRIDGE} -j DROP"
        run("ip6tables" if V6 else "iptables", *drop.split())

    def make_cgroup(self, name: str) -> None:
        """Make a cgroup in every hierarchy; a v1 cpuset is unusable until its processors are set."""
        for hierarchy in _hierarchies():
            folder = hierarchy / name
            folder.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if (folder / setting).exists() and hierarchy != CGROUPS:
                    (folder / setting).write_text((hierarchy / setting).read_text())
            # A node gets the weight of many processes, so other work on the machine does not starve it.
            for setting, most in (("cpu.shares", "65536"), ("cpu.weight", "10000")):
                if (folder / setting).exists():
                    (folder / setting).write_text(most)

    def processes_of(self, name: str) -> list[int]:
        # One hierarchy is enough: containers are members of all of them.
        folder = (_hierarchies()[0] if _hierarchies() == [CGROUPS] else CGROUPS / "memory") / name
        return [pid for each in _subtree(folder) for pid in _members(each)]

    def remove_cgroup(self, name: str) -> None:
        """Remove the cgroup and its descendants; processes that still run in it are killed first."""
        for hierarchy in _hierarchies():
            ends_s = time.monotonic() + 10
            folder = hierarchy / name
            while folder.exists() and time.monotonic() < ends_s:
                for each in _subtree(folder):
                    with contextlib.suppress(OSError):
                        if (each / "freezer.state").exists():
                            (each / "freezer.state").write_text("THAWED")
                    for pid in _members(each):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, 9)
                    with contextlib.suppress(OSError):
                        each.rmdir()
                time.sleep(0.02)

    def unmount(self) -> None:
        mounts = [
            line.split()[1].replace("\\040", " ") for line in Path("/proc/mounts").read_text().splitlines()
        ]
        for mount in sorted((m for m in mounts if m.startswith(f"{self._folder}/")), key=len, reverse=True):
            run("umount", "-l", mount, check=False)

    def restore(self) -> list[str]:
        """Restore everything; return what still differs (empty on success)."""
        if not self._record.exists():
            return []
        record = json.loads(self._record.read_text())
        run("ip", "link", "delete", BRIDGE, check=False)
        _drop_rules(keep=set(record["rules"]))
        for name, value in record["sysctls"].items():
            path = Path("/proc/sys", name)
            if path.read_text().strip() != value:
                path.write_text(value)
        for name in record["folders"]:
            shutil.rmtree(name, ignore_errors=True)
        left = [f"rule {rule}" for rule in sorted(_rules() - set(record["rules"]))]
        left += [
            f"sysctl {name}"
            for name, value in record["sysctls"].items()
            if Path("/proc/sys", name).read_text().strip() != value
        ]
        left += [name for name in record["folders"] if Path(name).exists()]
        left += [f"interface {BRIDGE}"] if Path("/sys/class/net", BRIDGE).exists() else []
        self._record.unlink()
        return left


def _hierarchies() -> list[Path]:
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [
        folder
        for folder in sorted(CGROUPS.iterdir())
        if folder.is_dir() and (folder / "cgroup.procs").exists()
    ]


def _subtree(folder: Path) -> list[Path]:
    """Return the folder and all its descendants, the deepest first; a folder that disappears meanwhile is skipped."""
    return [Path(root) for root, _, _ in os.walk(folder, topdown=False)]


def _members(cgroup: Path) -> list[int]:
    """Return the processes of one cgroup; none when it does not exist."""
    try:
        return [int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _rules() -> set[str]:
    """Every rule and chain of both families, as `program table spec`."""
    found = set()
    for program in ("iptables", "ip6tables"):  # kube-proxy writes both
        for table in ("filter", "nat", "mangle"):
            for line in run(program, "-w", "-t", table, "-S", check=program == "iptables").splitlines():
                found.add(f"{program} {table} {line}")
    return found


def _drop_rules(keep: set[str]) -> None:
    """Delete the rules that were not there before, then their chains."""
    ours = [rule.split(" ", 3) for rule in _rules() - keep]
    for program, table, how, spec in ours:
        if how == "-A":
            # Match the program's quoting: comments have spaces.
            run(program, "-w", "-t", table, "-D", *shlex.split(spec))
    for program, table, how, spec in ours:
        if how == "-N":
            run(program, "-w", "-t", table, "-X", spec)
