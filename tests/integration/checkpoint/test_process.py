"""Process setup of deltashard's programs: IPv4 and IPv6 addresses, and the limit of open files."""

import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import urllib3
import yaml
from deltashard_checkpoint.process import ANY_ADDRESS, listen, usable_host

from tests.support.eventually import eventually
from tests.support.server.minio_server import free_port

UNREACHABLE_KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "c",
}
"""A kubeconfig of an unreachable API server."""
API = "--kubeconfig={at}/kubeconfig --certificate-dir={at}"
PROGRAMS = {
    "webhook": f"deltashard_operator.main --port={{port}} {API}",
    "controller": f"deltashard_operator.controller_main --fleet-port={{port}} {API}",
    "sidecar": (
        "deltashard_sidecar.main serve --run=r --url=file://{at}/store --dir={at}/run --cache-dir={at}/cache "
        "--arena-bytes=67108864 --metrics-host=::"
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_dual_stack_serving_and_open_file_limit(program: str, tmp_path: Path) -> None:
    """A kubelet of an IPv6-only cluster probes the IPv6 address. containerd 2 sets a low soft limit of open files."""
    port, log = free_port(), tmp_path / "log"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(UNREACHABLE_KUBECONFIG))
    flags = PROGRAMS[program].format(at=tmp_path, port=free_port())
    command = f"ulimit -Sn 256; exec {sys.executable} -m {flags} --metrics-port={port}"
    with log.open("wb") as out:
        process = subprocess.Popen(["bash", "-c", command], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        with urllib3.PoolManager(retries=False, timeout=60.0) as http:

            def metrics(host: str) -> str:
                assert process.poll() is None, log.read_text()
                try:
                    return http.request("GET", f"http://{host}:{port}/metrics").data.decode()
                except urllib3.exceptions.HTTPError:
                    return ""

            for host in ("127.0.0.1", "[::1]"):
                page = eventually(lambda host=host: metrics(host), host)
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert process.returncode == 0, log.read_text()
    assert soft == hard
    assert ("process_open_fds" in page) == (program != "sidecar")


def test_listens_on_ipv4_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel was started with ipv6.disable=1."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert [usable_host(each) for each in ("127.0.0.1", "::1")] == ["127.0.0.1", "::1"]
    with listen(ANY_ADDRESS, 0) as server:
        assert (server.family, server.getsockname()[0]) == (socket.AF_INET, "0.0.0.0")
