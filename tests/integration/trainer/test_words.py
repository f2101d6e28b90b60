"""What a person says of a run whose trainer is real: beside it, and after it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.command_line import Cli, running

TRAINER = """
import sys, deltashard, torch
url, run, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.ModuleDict({"e": torch.nn.EmbeddingBag(400, 8, sparse=True), "l": torch.nn.Linear(8, 1)})
optimizers = [torch.optim.Adagrad(model["e"].parameters(), lr=0.1), torch.optim.Adam(model["l"].parameters())]
ckpt = deltashard.Checkpointer(
    model, optimizers, url=url, run=run, encoding="fp32", keep_last=1,
    sidecar={"housekeeping_s": 0.05, "linger_s": 0.0},
)
resumed = ckpt.restore()
step = resumed.step if resumed else 0
print("resumed", step, flush=True)
last = step + steps
while step < last:
    if step % 10 == 0 and not sys.stdin.readline():
        break
    ids = torch.randint(0, 400, (16, 4), generator=torch.Generator().manual_seed(step))
    for optimizer in optimizers:
        optimizer.zero_grad()
    model["l"](model["e"](ids)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    step += 1
    ckpt.step()
    if step % 10 == 0:
        ckpt.save().wait()
        print("saved", step, flush=True)
ckpt.close()
"""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return running(capsys)


class Trainer:
    """A training process that goes ten steps and a save at a time."""

    def __init__(self, script: Path, url: str, run: str, steps: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script), url, run, str(steps)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.resumed = int(self.said().split()[1])

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def go(self) -> None:
        """Ten steps; returns when they are saved."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        assert self.said().startswith("saved")

    def end(self) -> None:
        """As a program ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        self.close()

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()


def test_a_real_trainer_goes_on_beside_words_and_after_a_rewind(cli: Cli, tmp_path: Path) -> None:
    script, url = tmp_path / "train.py", f"file://{tmp_path}/store"
    script.write_text(TRAINER)
    store = open_store(url)
    trainer = Trainer(script, url, "r", 100)
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
    again = Trainer(script, url, "r", 20)
    try:
        assert again.resumed == 10
        again.go()
        again.end()
    finally:
        again.kill()
    newest = RunLog(store, "r").refresh().newest()
    assert newest is not None
    assert newest.step == 20
    assert cli("verify", "--deep", f"{url}/r")[0] == 0
    for run, which in (("r", "pin:early"), ("fork", "latest")):
        found = read_checkpoint(store, run, which)
        for name, table in wanted.tables.items():
            assert found.tables[name].weights.tobytes() == table.weights.tobytes()
    assert cli("rm", f"{url}/r", "--yes", "--ended")[0] == 0
    assert [info.key for info in store.list("r/")] == []
