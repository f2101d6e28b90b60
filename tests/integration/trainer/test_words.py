"""What a person says of a run whose trainer is real: beside it, and after it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.command_line import Cli, running
from tests.support.tool import ROOT

TRAINER = """
import sys, deltashard
from tests.support.trainer.toy_loop import Loop
loop, settings = Loop(), {"housekeeping_s": 0.05, "linger_s": 0.0}
options = {"encoding": "fp32", "keep_last": 1, "sidecar": settings}
ckpt = deltashard.Checkpointer(loop.net, loop.optimizer, url=sys.argv[1], run=sys.argv[2], **options)
ckpt.restore()
print("resumed", ckpt.steps, flush=True)
while sys.stdin.readline():
    loop.train(10, ckpt)
    ckpt.save().wait()
    print("saved", ckpt.steps, flush=True)
ckpt.close()
"""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return running(capsys)


class Trainer:
    """A training process that goes ten steps and a save at a time."""

    def __init__(self, url: str, run: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", TRAINER, url, run]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.resumed = int(self.process.stdout.readline().split()[1])

    def go(self) -> None:
        """Ten steps; returns when they are saved."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().startswith("saved")

    def end(self) -> None:
        """As a program ends."""
        self.process.stdin.close()
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()


def test_a_real_trainer_goes_on_beside_words_and_after_a_rewind(cli: Cli, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    store = open_store(url)
    trainer = Trainer(url, "r")
    try:
        trainer.go()
        assert cli("pin", f"{url}/r", "early", "-c", "step:10")[0] == 0
        for _ in range(3):  # it commits on, and retention, its own and by hand, keeps what was pinned
            trainer.go()
            assert cli("gc", f"{url}/r", "--keep-last", "1")[0] == 0
        assert 10 in {each.step for each in RunLog(store, "r").refresh().checkpoints.values()}
        wanted = read_checkpoint(store, "r", "step:10")
        assert cli("rewind", f"{url}/r", "-c", "pin:early")[0] == 2
        assert cli("rm", f"{url}/r", "--yes")[0] == 2
        code, text = cli("cp", f"{url}/r", url, "--as", "fork", "-c", "pin:early")
        assert code == 0, text
        trainer.go()
    finally:
        trainer.kill()
    assert cli("rewind", f"{url}/r", "-c", "pin:early")[0] == 2, "it was killed, and nothing says so"
    code, text = cli("rewind", f"{url}/r", "-c", "pin:early", "--ended")
    assert code == 0, text
    again = Trainer(url, "r")
    try:
        assert again.resumed == 10
        again.go()
        again.end()
    finally:
        again.kill()
    newest = RunLog(store, "r").refresh().newest()
    assert newest.step == 20
    assert cli("verify", "--deep", f"{url}/r")[0] == 0
    for run, which in (("r", "pin:early"), ("fork", "latest")):
        found = read_checkpoint(store, run, which)
        for name, table in wanted.tables.items():
            assert found.tables[name].weights.tobytes() == table.weights.tobytes()
    assert cli("rm", f"{url}/r", "--yes", "--ended")[0] == 0
    assert [info.key for info in store.list("r/")] == []
