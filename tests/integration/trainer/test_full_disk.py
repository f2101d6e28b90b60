"""A real full disk, and a read-only one, under a real trainer, its sidecar and the command line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard.errors import FencedError, SaveFailed
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write.attempt import open_attempt

from tests.support.checkpointers import MakeCheckpointer, checkpointers, simulate_crash
from tests.support.command_line import running
from tests.support.eventually import eventually
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.trainer.toy_loop import ToyLoop as AnyLoop

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
DISK_BYTES = 6 << 20
ToyLoop = partial(AnyLoop, rows=16_000, columns=8)
"""Tables of about 0.6 MiB with their optimizer state."""
Document = Callable[..., Any]
"""A function from arguments to a command's JSON document."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "store", size_bytes=DISK_BYTES) as found:
        yield found


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: SmallDisk) -> Iterator[MakeCheckpointer]:
    settings = {"gc_grace_s": 0, "maintenance_interval_s": 0}
    with checkpointers(
        tmp_path, monkeypatch, encoding="fp32", differential="full", every_s=0, keep_last=1, sidecar=settings
    ) as build:
        yield build


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Document:
    run = running(capsys)

    def document(*arguments: object, ok: int = 0) -> Any:
        code, shown = run(*arguments, "--json")
        assert code == ok, shown
        return json.JSONDecoder().raw_decode(shown)[0]

    return document


def fill_wholly(disk: SmallDisk) -> None:
    """Leave no space even for a folded state, because a log entry would use it."""
    disk.fill()
    for copy in [*disk.root.glob("r/log/fold-*"), disk.root / "r/log/HINT"]:
        copy.unlink()
    disk.fill()


def saved(make: MakeCheckpointer, *, saves: int = 2, **options: Any) -> torch.Tensor:
    loop = ToyLoop()
    ckpt = make(loop, sidecar={"maintenance_interval_s": -1}, **options)
    ckpt.restore()
    for _ in range(saves):
        loop.train(1, ckpt)
        ckpt.save("user").wait(60)
    weights = loop.weights.clone()
    simulate_crash(ckpt)
    return weights


def test_training_survives_full_disk_and_saves_when_freed(
    make: MakeCheckpointer, disk: SmallDisk, cli: Document, caplog: pytest.LogCaptureFixture
) -> None:
    newest = saved(make)
    url = str(disk.root)
    loop = ToyLoop()
    ckpt = make(loop)
    fill_wholly(disk)
    with caplog.at_level(logging.WARNING, "deltashard"):
        restored = ckpt.restore()
    assert (restored.step, restored.attempt, ckpt.attempt) == (2, None, None)
    assert torch.equal(loop.weights, newest)
    assert "the store takes no entry" in caplog.text
    assert "No space left" in caplog.text
    loop.train(1, ckpt)
    with pytest.raises(SaveFailed, match="nothing can be saved yet"):
        ckpt.save("user").wait(60)
    assert cli("verify", url)["problems"] == []
    assert not list(disk.root.glob("r/probe/*"))
    disk.empty()
    loop.train(1, ckpt)
    ckpt.save("user").wait(60)
    assert ckpt.attempt is not None
    ckpt.close()
    again = ToyLoop()
    with make(again) as resumed:
        found = resumed.restore()
        assert found.step == 4
        assert torch.equal(again.weights, loop.weights)


def test_gc_retire_and_rm_free_a_disk_without_one_free_block(
    make: MakeCheckpointer, disk: SmallDisk, cli: Document
) -> None:
    saved(make, saves=4)
    disk.fill()
    url = str(disk.root)
    assert [each["step"] for each in cli("ls", url, "--run", "r")["checkpoints"]][-1] == 4
    live = [each["seq"] for each in cli("ls", url, "--run", "r")["checkpoints"]]
    assert cli("retire", url, "--run", "r", "-c", f"seq:{min(live)}")["retired"] == [min(live)]
    found = cli("gc", url, "--keep-last", "1", "--grace", "0")
    assert found["collected"]["objects"] > 0
    assert disk.free_bytes > 0
    assert cli("verify", url, "--deep")["problems"] == []
    disk.fill()
    cli("rm", url, "--run", "r", "--yes", "--ended")
    assert not list(disk.root.glob("r/**/*"))


def test_failed_save_leaves_nothing_and_retention_frees_space(
    make: MakeCheckpointer, disk: SmallDisk
) -> None:
    saved(make, saves=4)
    loop = ToyLoop()
    ckpt = make(loop)
    ckpt.restore()
    disk.fill()
    packs = set(disk.root.glob("r/data/**/*.pack"))
    loop.train(1, ckpt)
    with pytest.raises(SaveFailed, match="full"):
        ckpt.save("user").wait(60)
    assert set(disk.root.glob("r/data/**/*.pack")) <= packs

    def saves() -> bool:
        loop.train(1, ckpt)
        try:
            ckpt.save("user").wait(60)
        except SaveFailed:
            return False
        return True

    eventually(saves, what="a save, once the sidecar has retired and deleted old checkpoints")
    ckpt.close()


def test_trainer_on_full_disk_is_fenced_by_earlier_open(make: MakeCheckpointer, disk: SmallDisk) -> None:
    saved(make)
    fill_wholly(disk)
    loop = ToyLoop()
    ckpt = make(loop)
    assert ckpt.restore().attempt is None
    disk.empty()
    with open_store(str(disk.root)) as store:
        log = RunLog(store, "r")
        owner = log.refresh().owner
        assert open_attempt(log, owner=owner, closing_wait_s=0.0).resume is not None

    def save() -> None:
        loop.train(1, ckpt)  # step() itself retries after its back-off
        ckpt.save("user").wait(60)

    with pytest.raises(FencedError, match="advanced since it was restored"):
        save()


def test_read_only_store_can_be_restored_and_read(
    make: MakeCheckpointer, disk: SmallDisk, cli: Document, tmp_path: Path
) -> None:
    newest = saved(make)
    disk.remount("ro")
    url = str(disk.root)
    try:
        loop = ToyLoop()
        ckpt = make(loop)
        assert ckpt.restore().step == 2
        assert torch.equal(loop.weights, newest)
        loop.train(1, ckpt)
        with pytest.raises(SaveFailed, match="Read-only"):
            ckpt.save("user").wait(60)
        live = [each["seq"] for each in cli("ls", url, "--run", "r")["checkpoints"]]
        cli("verify", url, "--deep")
        cli("inspect", url)
        cli("gc", url, "--dry-run")
        cli("diff", url, str(live[0]), str(live[1]), ok=1)
        cli("restore", url, str(tmp_path / "out"))
        cli("export", url, str(tmp_path / "out.safetensors"))
        with deltashard.open_checkpoint(url, "r") as reader:
            assert reader.step == 2
        simulate_crash(ckpt)
    finally:
        disk.remount("rw")
