"""Training continues after any error of user code inside a save: the failed save is counted, and its error named."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import deltashard
import pytest
import torch
from deltashard import wiring
from deltashard.errors import SaveFailed, WaitError
from torch import nn

from tests.support.checkpointers import checkpointers
from tests.support.trainer.toy_loop import ToyLoop

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class PreemptionError(Exception):
    """The exception of a user's signal handler."""


class Hooks:
    """User code in a save: each hook raises the configured exception."""

    def __init__(self) -> None:
        self.getter: BaseException | None = None
        self.judge: BaseException | None = None
        self.listener: BaseException | None = None
        self.signal: signal.Signals | None = None
        self.inner: Callable[[], object] | None = None

    def get(self) -> int:
        if self.inner is not None:
            self.inner()
        if self.signal is not None:
            signal.raise_signal(self.signal)
        if self.getter is not None:
            raise self.getter
        return 1

    def validate(self) -> bool:
        if self.judge is not None:
            raise self.judge
        return True

    def on_event(self, name: str, facts: Mapping[str, Any]) -> None:
        if self.listener is not None:
            raise self.listener


class HookedLoop(ToyLoop):
    """A loop with its Checkpointer, and a stateless optimizer whose table may grow."""

    ckpt: deltashard.Checkpointer

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = [torch.optim.SGD(self.net.parameters(), lr=0.1)]

    def step(self) -> None:
        self.train(1, self.ckpt)


@pytest.fixture
def hooks() -> Hooks:
    return Hooks()


@pytest.fixture
def loop(tmp_path: Path, hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> Iterator[HookedLoop]:
    before = {each: signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGINT)}
    made, state = HookedLoop(), {"mine": (hooks.get, lambda held: None)}
    with checkpointers(tmp_path, monkeypatch, state=state) as make:
        made.ckpt = make(made, validate=hooks.validate, on_event=hooks.on_event)
        yield made
    for each, handler in before.items():
        signal.signal(each, handler)


RAISED = [
    AssertionError("a"),
    IndexError("b"),
    MemoryError("c"),
    SystemExit(3),
    LookupError("d"),
    StopIteration(),
]


def test_user_code_exceptions_do_not_reach_loop(
    loop: HookedLoop, hooks: Hooks, caplog: pytest.LogCaptureFixture
) -> None:
    """Getters, validate= and on_event= raise exceptions of any class. The next save is complete.

    KeyboardInterrupt and exceptions of the user's signal handlers propagate.
    """
    for error in RAISED:
        hooks.getter = error
        loop.step()
        with pytest.raises(SaveFailed):
            loop.ckpt.save().wait(60)
    hooks.getter = None
    assert loop.ckpt.stats.failures.total() == len(RAISED)
    assert caplog.text.count("a save failed at step") == 1, "once until a save succeeds"

    for error in RAISED:
        hooks.judge = error
        loop.step()
        with pytest.raises(SaveFailed, match="validate"):
            loop.ckpt.save().wait(60)
    hooks.judge = None
    assert loop.ckpt.stats.failures["validate"] >= len(RAISED)

    for error in RAISED:
        hooks.listener = error
        loop.step()
        assert loop.ckpt.save().wait(60).step == loop.ckpt.steps
    hooks.listener = None
    assert loop.ckpt.stats.event_errors >= len(RAISED)

    def handler(*_: object) -> NoReturn:
        raise PreemptionError

    signal.signal(signal.SIGUSR1, handler)
    hooks.signal = signal.SIGUSR1
    with pytest.raises(PreemptionError):
        loop.ckpt.save()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hooks.signal = signal.SIGINT
    loop.step()
    with pytest.raises(KeyboardInterrupt):
        loop.ckpt.save()
    hooks.signal = None
    loop.step()
    assert loop.ckpt.save().wait(60).step == loop.ckpt.steps


def test_training_without_step_is_reported_at_close(
    loop: HookedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a save there are a warning and an event. A program that only evaluates gets neither."""
    events: list[str] = []
    loop.ckpt._listener._on_event = lambda name, facts: events.append(name)
    loop.ckpt._warn_if_unsaved()
    assert events == []
    loop.train(1)
    loop.ckpt.close()
    assert "step() was never called" in caplog.text
    assert "nothing_saved" in events


def test_nested_save_joins_outer_save(loop: HookedLoop, hooks: Hooks) -> None:
    """The inner save comes from a getter or a signal handler.

    The outer snapshot is complete, and no second one is taken.
    """
    asked: list[deltashard.SaveHandle] = []

    def ask() -> None:
        asked.append(loop.ckpt.save("within"))
        with pytest.raises(WaitError, match="is being copied"):
            asked[0].wait()
        with pytest.raises(SaveFailed, match="takes no further pin"):
            loop.ckpt.save("pinned", pin="within").wait()

    loop.step()
    hooks.inner = ask
    outer = loop.ckpt.save("outer")
    hooks.inner = None
    commit = outer.wait(60)
    assert [each.wait(60) for each in asked] == [commit]
    assert loop.ckpt.stats.failures.total() == 0
    loop.step()
    assert loop.ckpt.save().wait(60).step == commit.step + 1
    assert loop.ckpt.stats.commits == 2


def test_failed_constructor_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SIGTERM handler and its run's lock are removed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    net = nn.Linear(2, 1)
    options = {"url": tmp_path / "store", "run": "r", "arena_bytes": 64 << 20}

    def broken(*_: object, **__: object) -> NoReturn:
        raise MemoryError("while the parts were built")

    with monkeypatch.context() as patch:
        patch.setattr(wiring, "LastSnapshot", broken)
        with pytest.raises(MemoryError):
            deltashard.Checkpointer(net, torch.optim.SGD(net.parameters()), **options)
    assert signal.getsignal(signal.SIGTERM) is before
    with deltashard.Checkpointer(net, torch.optim.SGD(net.parameters()), **options):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
