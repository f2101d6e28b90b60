"""deltashard is upgraded and gets new certificates while Jobs are created and other Jobs train: no admission fails."""

from __future__ import annotations

import base64
import ssl
import time

import pytest
from deltashard_operator.tls import authority, issuance

from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.load import AdmissionLoad
from tests.cluster.scenario.system import NAMESPACE

pytestmark = pytest.mark.timeout(600, func_only=True)

DAY_S = 86400.0
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/{authority.SECRET}"


def test_admissions_succeed_during_upgrade(bench: ScenarioBench) -> None:
    system = bench.stage.system
    old = {pod["metadata"]["uid"] for pod in system.webhooks()}
    with AdmissionLoad(bench.cluster.api, bench.namespace, bench.manifest("load")) as load:
        load.wait_more(10)
        system.install(values={"webhook.podAnnotations": {"test/rolled": bench.namespace}})
        wait_until(
            lambda: not old & {pod["metadata"]["uid"] for pod in system.webhooks()},
            timeout_s=180,
            what="every old webhook pod gone",
        )
        load.wait_more(20)
    bench.note(f"{load.admitted} admitted, slowest {load.slowest_s:.2f} s")
    assert not load.failures, load.failures[:3]


def served(pod: dict[str, dict[str, str]]) -> bytes:
    """Return the PEM certificate that a webhook pod serves; empty while it serves none."""
    try:
        return ssl.get_server_certificate((pod["status"]["podIP"], 9443), timeout=10).strip().encode()
    except (OSError, KeyError):  # no answer in time, or a pod without an address yet
        return b""


def test_admissions_succeed_during_rotation(bench: ScenarioBench) -> None:
    api, system = bench.cluster.api, bench.stage.system

    def stored(key: str = "tls.crt") -> bytes:
        return base64.b64decode(api.get(SECRET)["data"][key]).strip()

    before = stored()
    signer = issuance.stored({"ca.crt": stored("ca.crt"), "ca.key": stored("ca.key")}, "ca", time.time())
    names, began_s = authority.names_in(NAMESPACE), time.time() - 80 * DAY_S
    aging = issuance.issue(names, signer, now_s=began_s, lasts_s=90 * DAY_S).data("tls")
    with AdmissionLoad(api, bench.namespace, bench.manifest("load")) as load:
        load.wait_more(10)
        # Simulates the passage of time: the served certificate is trusted, and has a few days left.
        change = {"data": {key: base64.b64encode(value).decode() for key, value in aging.items()}}
        api.patch(SECRET, change)
        began_s = time.monotonic()
        wait_until(
            lambda: stored() not in {before, aging["tls.crt"].strip()},
            timeout_s=180,
            what="a new certificate",
        )
        bench.note(f"renewed after {time.monotonic() - began_s:.0f} s")
        renewed = stored()
        wait_until(
            lambda: all(served(pod) == renewed for pod in system.webhooks()),
            timeout_s=180,
            what="every replica serves the new certificate",
            every_s=0.5,
        )
        bench.note(f"served by all after {time.monotonic() - began_s:.0f} s")
        load.wait_more(20)
    bench.note(f"{load.admitted} admitted, slowest {load.slowest_s:.2f} s")
    assert not load.failures, load.failures[:3]
