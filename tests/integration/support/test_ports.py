"""Ports of tests' servers: two processes never get the same one, and nobody gets one by chance."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.server import port
from tests.support.server.minio_server import ROOT, free_port

TAKER = """
import sys
from tests.support.server.port import free_port
print(*(free_port() for _ in range(200)), flush=True)
sys.stdin.read()
"""


def taker() -> subprocess.Popen[str]:
    """Another worker, with 200 ports."""
    return subprocess.Popen(
        [sys.executable, "-c", TAKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_a_port_is_one_processs_as_long_as_it_lives() -> None:
    """Whatever starts, stops and connects meanwhile: the kernel hands none of them out, and a dead one's are free."""
    workers = [taker(), taker()]
    try:
        theirs = []
        for each in workers:
            assert each.stdout is not None
            theirs.append({int(word) for word in each.stdout.readline().split()})
        mine = {free_port() for _ in range(200)}
        assert len(theirs[0] | theirs[1] | mine) == 600
        if port.RANGE.exists():
            assert max(theirs[0] | theirs[1] | mine) < int(port.RANGE.read_text().split()[0])
        assert not any(map(port._locked, theirs[0] | theirs[1]))
        workers[0].kill()
        workers[0].wait(60)
        taken = [each for each in theirs[0] if not port._locked(each)]
        assert len(taken) <= 3, "but for what another worker of this run may have got by now"
        assert not any(map(port._locked, theirs[1]))
    finally:
        for each in workers:
            each.kill()
            each.communicate()
