"""A snapshot is of one whole step and has that step's metadata; otherwise the save fails with a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deltashard.errors import SaveFailed, WaitError
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from torch import nn

from tests.incidents.toys import ToyRun, assert_holds, checkpointer, newest_step, stored


def interrupt_once(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Ctrl-C interrupt the next step of `optimizer` after its first parameter changed."""

    def torn(params: Any, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            params[0].add_(1.0)
        monkeypatch.undo()
        raise KeyboardInterrupt

    kind = type(optimizer)
    monkeypatch.setattr(sys.modules[kind.__module__], kind.__name__.lower(), torn)


@pytest.mark.parametrize("torn", ["tables", "dense"])
def test_no_snapshot_within_a_step_interrupted_by_ctrl_c(tmp_path: Path, torn: str) -> None:
    """Applies to save(), the timer and close(). Snapshots resume after the optimizer finishes a step."""
    with ToyRun(tmp_path / "store", every_steps=1) as run:
        run.train(2)
        run.save()
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(getattr(run, torn), patch)
            with pytest.raises(KeyboardInterrupt):
                run.train()
        snapshots = run.ckpt.stats.snapshots
        handle = run.ckpt.save("after Ctrl-C")
        with pytest.raises(WaitError, match="an exception interrupted"):
            handle.wait()
        # A whole step of another optimizer, followed by step(), is not a boundary.
        (run.dense if torn == "tables" else run.tables).step()
        run.ckpt.step()
        assert run.ckpt.stats.snapshots == snapshots
        run.train()
        assert handle.snapshot_id is not None, "the first whole step takes the snapshot"
        was = run.state()
        assert handle.wait(60).step == 4
        assert_holds(stored(tmp_path / "store", "step:4"), was)


def test_close_refuses_a_torn_step(tmp_path: Path) -> None:
    with ToyRun(tmp_path / "store") as run:
        run.train(2)
        run.save()
        run.train(1)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(run.dense, patch)
            with pytest.raises(KeyboardInterrupt):
                run.train()
        with pytest.raises(SaveFailed, match="an exception interrupted"):
            run.ckpt.close(deadline_s=60)
    assert newest_step(tmp_path / "store") == 2


def test_snapshot_at_every_step_of_alternating_optimizers(tmp_path: Path) -> None:
    """One optimizer steps in even steps, the other in odd ones. Each end of `step()` is a boundary."""
    with ToyRun(tmp_path / "store") as run:
        for step in range(4):
            ids = torch.randint(0, 3000, (8, 4), generator=run.generator)
            run.model(ids).square().mean().backward()
            mine = (run.tables, run.dense)[step % 2]
            mine.step()
            mine.zero_grad()
            run.ckpt.step()
            assert run.ckpt.save().wait(60).step == step + 1


class NormedToy(nn.Module):
    """A toy whose forward pass changes BatchNorm's statistics and consumes dropout's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_save_between_forward_and_step_is_taken_at_next_step(tmp_path: Path) -> None:
    """The loader is not wrapped. The stored statistics are those of the stored step."""
    torch.manual_seed(0)
    model = NormedToy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = checkpointer(model, optimizer, tmp_path / "store")
    ckpt.restore()
    handle = None
    for step in range(1, 4):
        loss = model(torch.randn(8, 3)).square().mean()
        if step == 3:
            handle = ckpt.save("in between")
            assert handle.snapshot_id is None
            with pytest.raises(WaitError, match="forward"):
                handle.wait()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step()
    assert handle is not None
    was = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert handle.wait(60).step == 3
    ckpt.close()
    again = NormedToy()
    ckpt = checkpointer(again, torch.optim.SGD(again.parameters(), lr=0.1), tmp_path / "store")
    assert ckpt.restore() is not None
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in was.items())
    ckpt.close()


@contextmanager
def without_notifications(run: ToyRun) -> Iterator[None]:
    """Suppress the sidecar's notices, so that a save stays in flight after its snapshot."""
    session = run.ckpt._session
    post, kept = session.post, []
    session.post = kept.append
    try:
        yield
    finally:
        session.post = post
        for event in kept:
            post(event)


def test_pin_requested_during_save_keeps_its_step_or_fails(tmp_path: Path) -> None:
    """A pinned save never moves to a later model; an unpinned save does."""
    url = tmp_path / "store"
    with ToyRun(url, keep_last=20) as run:
        run.train(2)
        with without_notifications(run):
            first = run.ckpt.save("first", metadata={"loss": 1})
            assert first.snapshot_id is not None
            lost = run.ckpt.save("lost", pin="best", metadata={"loss": 2})
            plain = run.ckpt.save("plain")
            assert (lost.snapshot_id, plain.snapshot_id) == (None, None)
            run.train(1)
            assert lost.done
            with pytest.raises(SaveFailed, match="step 2 was not captured, because the previous save"):
                lost.wait()
            assert not plain.done
        assert plain.wait(60).step == 3
        # A pinned save that is awaited is exact: it follows the save in flight, still at the same step.
        run.train(1)
        with without_notifications(run):
            run.ckpt.save("busy", metadata={"loss": 3})
            kept = run.ckpt.save("kept", pin="best", metadata={"loss": 4})
        assert kept.wait(60).step == 4
        kept_seq = kept.wait(60).seq
        was = run.state()
    found = RunLog(open_store(str(url)), "run").refresh()
    assert {c.metadata.get("loss") for c in found.checkpoints.values() if c.step == 2} == {"1"}
    assert [(seq, c.metadata["loss"]) for seq, c in found.checkpoints.items() if c.pins] == [(kept_seq, "4")]
    assert_holds(stored(url, "pin:best"), was)


def test_vetoed_save_fails_with_reason(tmp_path: Path) -> None:
    with ToyRun(tmp_path / "store", validate=lambda: False) as run:
        run.train(1)
        with pytest.raises(SaveFailed, match="vetoed"):
            run.ckpt.save().wait()
