"""A killed or unresponsive sidecar blocks training once, for a small budget; waiting callers get an error."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard.errors import FencedError, SaveFailed
from deltashard.save import save_loop, taker
from deltashard.snapshot import save_stream
from torch import nn

from tests.incidents.toys import ToyRun, checkpointer, newest_step
from tests.support.eventually import eventually
from tests.support.sidecar_process import SidecarProcess, sidecar


def state_of(pid: int | None) -> str:
    """Return the one-letter process state of ps; T means stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """Stop the process inside this context, with a short stall budget for training."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: state_of(pid) == "T", what="stopped")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(save_stream, "HOLD_S", 0.2)
            yield
            assert state_of(pid) == "T"
    finally:
        os.kill(pid, signal.SIGCONT)


def assert_saves_resume(ckpt: deltashard.Checkpointer, train: Callable[[], None]) -> None:
    def saved() -> bool:
        train()
        try:
            ckpt.save().wait(60)
        except SaveFailed:
            return False
        return True

    eventually(saved, what="a save")
    assert ckpt.stats.last_commit.step == ckpt.steps


def test_stopped_sidecar_fails_one_save(tmp_path: Path) -> None:
    """The save fails with a reason while the sidecar is stopped. No further save is tried until the sidecar answers."""
    with ToyRun(tmp_path / "store") as run:
        run.train(2)
        run.save()
        with stopped(run.ckpt.sidecar_pid):
            run.train(1)
            handle = run.ckpt.save("unanswered")
            assert handle.done
            with pytest.raises(SaveFailed, match="silent"):
                handle.wait()
            eventually(lambda: run.ckpt._session.link is None, what="the sidecar counts as disconnected")
            failures = run.ckpt.stats.failures.total()
            for _ in range(5):
                run.train(1)
                handle = run.ckpt.save("meanwhile")
            assert not handle.done
            assert run.ckpt.stats.failures.total() == failures
        assert handle.wait(60).step == run.ckpt.steps
        assert_saves_resume(run.ckpt, run.train)


def test_reattach_to_stopped_sidecar_fails_the_save(tmp_path: Path) -> None:
    """The first snapshot after optimizer state appeared attaches again, with the same budget."""
    model = nn.Embedding(300, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    ckpt = checkpointer(model, optimizer, tmp_path / "store")

    def train() -> None:
        optimizer.zero_grad()
        model(torch.arange(10)).sum().backward()
        optimizer.step()
        ckpt.step()

    ckpt.restore()
    train()
    with stopped(ckpt.sidecar_pid):
        with pytest.raises(SaveFailed, match="described again"):
            ckpt.save().wait()
        train()
    assert_saves_resume(ckpt, train)
    ckpt.close()


def test_sidecar_stopped_during_copy_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot larger than the arena waits for blocks within its stall budget, and only for a responsive sidecar."""
    model = nn.Embedding(1_500_000, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = checkpointer(
        model, optimizer, tmp_path / "store", encoding="q4", sidecar={"stall_budget_s": 3600.0}
    )
    ckpt.restore()
    optimizer.step()
    ckpt.step()
    crash_point = taker.crash_point

    def stop(name: str) -> None:
        if name == "snapshot.begun":
            os.kill(ckpt.sidecar_pid or 0, signal.SIGSTOP)
            monkeypatch.setattr(save_stream, "HOLD_S", 0.2)
        crash_point(name)

    monkeypatch.setattr(taker, "crash_point", stop)
    try:
        handle = ckpt.save()
        with pytest.raises(SaveFailed, match="does not answer"):
            handle.wait()
        assert state_of(ckpt.sidecar_pid) == "T"
    finally:
        os.kill(ckpt.sidecar_pid or 0, signal.SIGCONT)
        ckpt.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_close_meets_deadline_with_stopped_sidecar(tmp_path: Path) -> None:
    """The sidecar stops just before close(), or earlier while the session thread tries to attach."""
    for known in (False, True):
        run = ToyRun(tmp_path / str(known))
        run.train(1)
        run.save()
        pid = run.ckpt.sidecar_pid
        with stopped(pid):
            run.train(1)
            if known:
                assert run.ckpt.save().done
                eventually(lambda run=run: run.ckpt._session.link is None, what="disconnected")
            with pytest.raises(SaveFailed, match="not durable"):
                run.ckpt.close(deadline_s=1)
            thread = run.ckpt._session._thread
            eventually(lambda thread=thread: not thread.is_alive(), what="the session thread ends")
        assert newest_step(tmp_path / str(known)) == 1


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarProcess]:
    """Start a sidecar of another container, which the trainer cannot restart."""
    with sidecar(tmp_path, f"file://{tmp_path}/store", encoding="fp32") as process:
        monkeypatch.setenv("DELTASHARD_SOCKET", str(process.socket))
        yield process


def test_wait_without_timeout_ends_when_sidecar_is_gone(
    tmp_path: Path, pod: SidecarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread, which takes snapshots, and another thread wait. Fencing ends pending saves."""
    with ToyRun(tmp_path / "store") as run:
        run.train(1)
        run.save()
        pod.signal(signal.SIGKILL)
        eventually(lambda: run.ckpt._session.link is None, what="the loss is noticed")
        run.train(1)
        monkeypatch.setattr(save_loop, "MAX_DISCONNECTED_S", 0.0)
        with pytest.raises(SaveFailed, match="has been disconnected"):
            run.ckpt.save().wait()
        other = run.ckpt.save()
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                other.wait()
            except SaveFailed as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(60)
        assert ["has been disconnected" in str(error) for error in raised] == [True]
        run.ckpt._session.fence(FencedError("another process trains", where="test"))
        with pytest.raises(FencedError):
            run.train(1)
        assert isinstance(other.error, FencedError)


def test_save_failing_before_send_backs_off(tmp_path: Path) -> None:
    with ToyRun(tmp_path / "store") as run:
        run.train(1)
        run.ckpt._wiring.records.failure_tracker._failures = 10  # the next pause is the longest: a minute
        tries = 0

        def broken() -> Any:
            nonlocal tries
            tries += 1
            raise RuntimeError("the tables cannot be read")

        refresh, run.ckpt._program.tracking.refresh = run.ckpt._program.tracking.refresh, broken
        with pytest.raises(SaveFailed, match="the tables cannot be read"):
            run.ckpt.save().wait()
        handles = []
        for _ in range(5):
            run.train(1)
            handles.append(run.ckpt.save("again"))
        assert tries == 1
        assert not any(handle.done for handle in handles)
        pinned = run.ckpt.save(pin="now")
        run.train(1)
        with pytest.raises(SaveFailed, match="a save had failed"):
            pinned.wait()
        run.ckpt._program.tracking.refresh = refresh
        assert {handle.wait(60).step for handle in handles} == {run.ckpt.steps}
