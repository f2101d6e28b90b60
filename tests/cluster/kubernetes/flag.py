"""Command lines and configuration files of the control plane. The functions only write files.

Everything listens on loopback or on the bridge. etcd does not sync to the disk: a cluster exists for minutes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.kubernetes.certificate import ClusterAuthority
from tests.cluster.kubernetes.host import API_SERVICE, HOST, HOST_ADDRESS, SERVICES, SUBNET, V6
from tests.support.server.minio_server import free_port

SERVER = f"https://{HOST}:6443"
AUDIT_LOG = "audit.jsonl"
"""Every write that the apiserver accepted, one JSON event a line: user, verb, object."""


def etcd(folder: Path, client: str) -> list[str]:
    """Flags of etcd that serves at the URL `client`."""
    peer = f"http://127.0.0.1:{free_port()}"
    return [
        f"--data-dir={folder / 'etcd'}", "--name=node0", f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=node0={peer}", "--unsafe-no-fsync",
        "--log-level=warn",
    ]  # fmt: skip


def _audit_policy() -> dict[str, Any]:
    """Audit every write without its body; leases and reviews are noise."""
    leases = [{"group": "coordination.k8s.io", "resources": ["leases"]}]
    reviews = [
        {"group": "authorization.k8s.io", "resources": ["subjectaccessreviews"]},
        {"group": "authentication.k8s.io", "resources": ["tokenreviews"]},
    ]
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "verbs": ["get", "list", "watch"]},
            {"level": "None", "resources": leases + reviews},
            {"level": "Metadata"},
        ],
    }


def apiserver(folder: Path, authority: ClusterAuthority, etcd_url: str) -> list[str]:
    names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ]
    serving = authority.issue(
        "apiserver", user="kube-apiserver", alternatives=["127.0.0.1", HOST_ADDRESS, API_SERVICE, *names]
    )
    kubelets = authority.issue("apiserver-kubelets", user="kube-apiserver", group="system:masters")
    front = authority.issue("front-proxy", user="front-proxy")
    public, private = authority.account_keys()
    ca = authority.file
    policy = folder / "audit-policy.json"
    policy.write_text(json.dumps(_audit_policy()))
    return [
        f"--etcd-servers={etcd_url}", f"--bind-address={HOST_ADDRESS}",
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
        f"--audit-policy-file={policy}", f"--audit-log-path={folder / AUDIT_LOG}",
        "--audit-log-mode=blocking-strict",  # an event is in the file before its request is answered
    ]  # fmt: skip


def _config(authority: ClusterAuthority, name: str) -> Path:
    return authority.kubeconfig(name, server=SERVER, user=f"system:{name}")


def controller_manager(folder: Path, authority: ClusterAuthority) -> list[str]:
    """Flags of kube-controller-manager, which marks a node lost after 12 s: a short stall of this machine loses none."""
    ca, key = authority.file, authority.key_file
    return [
        f"--kubeconfig={_config(authority, 'kube-controller-manager')}", "--bind-address=127.0.0.1",
        f"--secure-port={free_port()}", f"--cert-dir={folder / 'controller-manager'}",
        "--use-service-account-credentials", f"--root-ca-file={ca}",
        f"--service-account-private-key-file={authority.folder / 'accounts.key'}",
        f"--cluster-signing-cert-file={ca}", f"--cluster-signing-key-file={key}", "--leader-elect=false",
        "--node-monitor-period=1s", "--node-monitor-grace-period=12s", "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]  # fmt: skip


def scheduler(folder: Path, authority: ClusterAuthority) -> list[str]:
    return [
        f"--kubeconfig={_config(authority, 'kube-scheduler')}", "--bind-address=127.0.0.1",
        f"--secure-port={free_port()}", f"--cert-dir={folder / 'scheduler'}", "--leader-elect=false",
    ]  # fmt: skip


def proxy(folder: Path, authority: ClusterAuthority, nodes: Sequence[str]) -> list[str]:
    """Flags of kube-proxy; one serves all nodes, which share the host's network."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(_config(authority, "kube-proxy"))},
        "mode": "iptables",
        "bindAddress": HOST_ADDRESS,
        "clusterCIDR": SUBNET,
        "hostnameOverride": nodes[0],
        "healthzBindAddress": f"127.0.0.1:{free_port()}",
        "metricsBindAddress": f"127.0.0.1:{free_port()}",
        "nodePortAddresses": ["::1/128" if V6 else "127.0.0.0/8"],
        "iptables": {
            "masqueradeAll": True,
            "localhostNodePorts": False,
            "minSyncPeriod": "100ms",
            "syncPeriod": "30s",
        },
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    path = folder / "kube-proxy.json"
    path.write_text(json.dumps(config))
    return [f"--config={path}"]


def dns(folder: Path, kubeconfig: Path) -> tuple[list[str], str]:
    """Flags of CoreDNS, which runs on the host at port 53 of the bridge, and the URL of its readiness check.

    A name outside of the cluster does not exist: the cluster has no route out.
    """
    port = free_port()
    corefile = folder / "Corefile"
    corefile.write_text(
        f""".:53 {{
    bind {HOST_ADDRESS}
    errors
    ready 127.0.0.1:{port}
    cache 5
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        ttl 5
    }}
}}
"""
    )
    return ["-conf", str(corefile)], f"http://127.0.0.1:{port}/ready"
