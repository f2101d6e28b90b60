# ruff: noqa: NPY002 - numpy's global generator is what is tested
"""Wrapped loaders: what was delivered, and what a resumed iteration yields and draws."""

from __future__ import annotations

import gc
import random
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deltashard.errors import CheckpointMismatch, StateError
from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.state.rng import apply_globals, capture_globals
from deltashard.state.value import decode_value, encode_value
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.checkpointers import checkpointers
from tests.support.trainer.step_count import StepCount

# torchdata asks torch for what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(Dataset[Any]):
    """0..n-1, each with noise from the global generators if asked."""

    def __init__(self, n: int = 23, *, noisy: bool = False) -> None:
        self.n = n
        self.noisy = noisy

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> float:
        return i + (float(torch.rand(())) + random.random() + float(np.random.rand()) if self.noisy else 0.0)


class Stream(IterableDataset[Any]):
    """Draws its order from the default generator."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(23).tolist()
        yield from order


class Mine:
    """A re-iterable that draws its order from the default generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.randperm(23).split(4)


def factory(epoch: int, start: int) -> Iterator[torch.Tensor]:
    order = torch.randperm(23, generator=torch.Generator().manual_seed(epoch))
    return iter(order.split(4)[start:])


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "noisy": lambda: DataLoader(Numbers(noisy=True), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9)
    ),
    "no batching": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "iterable dataset": lambda: DataLoader(Stream(), batch_size=4),
    "workers": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    "re-iterable": Mine,
    "list": lambda: [torch.tensor(i) for i in range(6)],
    "factory": lambda: factory,
    "stateful": lambda: StatefulDataLoader(Numbers(noisy=True), batch_size=4, shuffle=True),
    "stateful workers": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
}


class Program:
    """A loop that draws dropout after every batch, as a training step would."""

    def __init__(self, make: Callable[[], Any], **options: Any) -> None:
        self.steps = StepCount()
        self.seen: list[tuple[int, Any, float]] = []
        self.loader = WrappedLoader(make(), clock=self.steps, **options)

    def run(self, until: int) -> None:
        while self.steps.now < until:
            for batch in self.loader:
                self.seen.append((self.loader.epoch, torch.as_tensor(batch).tolist(), float(torch.rand(()))))
                self.steps.now += 1
                if self.steps.now == until:
                    return

    def cut(self) -> tuple[bytes, bytes]:
        """(loader, rng) as a checkpoint would hold them."""
        rng = self.loader.boundary_rng() or capture_globals()
        tree = self.loader.capture()
        apply_globals(dict(rng))
        return encode_value(tree).to_bytes(), encode_value(rng).to_bytes()


@pytest.mark.parametrize(
    ("kind", "at"),
    # Starting worker processes is slow: for those only inside, and at the end of, an epoch.
    [(kind, at) for kind in LOADERS for at in ((5, 6) if "workers" in kind else (1, 5, 6, 7, 10))],
)
def test_a_resumed_loop_sees_and_draws_what_the_lost_one_would_have(kind: str, at: int) -> None:
    """Every kind of loader, in the middle, at the end and at the start of an epoch."""
    end = 14
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)
    program = Program(LOADERS[kind])
    program.run(at)
    loader, rng = program.cut()
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    resumed = Program(LOADERS[kind])
    resumed.steps.now = at
    held = decode_value(rng)
    apply_globals(held)
    resumed.loader.resume(decode_value(loader), held)
    resumed.run(end)
    assert resumed.seen == _uninterrupted(kind, at, end)


def _uninterrupted(kind: str, at: int, end: int) -> list[tuple[int, Any, float]]:
    """The uninterrupted run's batches after `at`."""
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)
    program = Program(LOADERS[kind])
    program.run(end)
    return program.seen[at:]


def draw_and_go_on(loader: WrappedLoader, steps: StepCount, *, upto: int, late: bool) -> list[Any]:
    """Batches and draws of training until step `upto`; `late`: something is drawn before the first batch, too."""
    seen = []
    batches = iter(loader)
    if late:
        torch.rand(3)
    for batch in batches:
        seen.append((batch.tolist(), float(torch.rand(()))))
        steps.now += 1
        if steps.now == upto:
            break
    return seen


def in_another_process(
    cut: WrappedLoader, make: Callable[[StepCount], WrappedLoader], *, step: int
) -> tuple[WrappedLoader, StepCount]:
    """What goes on where `cut` was after `step`, under the random state of that."""
    rng = encode_value(cut.boundary_rng() or capture_globals()).to_bytes()
    tree = encode_value(cut.capture()).to_bytes()
    torch.manual_seed(99)
    steps, held = StepCount(step), decode_value(rng)
    apply_globals(held)
    again = make(steps)
    again.resume(decode_value(tree), held)
    return again, steps


@pytest.mark.parametrize("own", [False, True], ids=["default generator", "own generator"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "drawn between"])
@pytest.mark.parametrize("skip", ["sampler", "replay"])
@pytest.mark.parametrize(("lost", "resumed"), [(2, 0), (0, 2), (1, 2), (2, 2), (0, 0)])
def test_another_number_of_workers_goes_on_in_the_same_order(
    lost: int, resumed: int, skip: Any, late: bool, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers have the order drawn when the iterator is created, a loader without them when it is asked for a batch."""

    def loader(workers: int, steps: StepCount) -> WrappedLoader:
        generator = torch.Generator().manual_seed(3) if own else None
        made = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers, generator=generator)
        return WrappedLoader(made, clock=steps, skip=skip)

    torch.manual_seed(4)
    steps = StepCount()
    wanted = draw_and_go_on(loader(lost, steps), steps, upto=6, late=late)
    torch.manual_seed(4)
    steps = StepCount()
    cut = loader(lost, steps)
    seen = draw_and_go_on(cut, steps, upto=3, late=late)
    again, steps = in_another_process(cut, lambda steps: loader(resumed, steps), step=3)
    seen += draw_and_go_on(again, steps, upto=6, late=late)
    # What was skipped by fetching is compared by its content.
    said = skip == "replay" and "does not give what it gave in the lost process" in caplog.text
    assert seen == wanted or said
    assert not said or (late and resumed > lost)


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize("skip", ["sampler", "replay"])
@pytest.mark.parametrize(
    ("lost", "resumed"),
    [
        (PERSISTENT, {"num_workers": 2}),
        (PERSISTENT, {}),
        (PERSISTENT, PERSISTENT),
        ({"num_workers": 2}, PERSISTENT),
        ({}, PERSISTENT),
    ],
)
def test_workers_that_persist_no_more_go_on_in_the_same_order(
    lost: dict[str, Any], resumed: dict[str, Any], skip: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In their second epoch they draw no seed."""

    def loader(options: dict[str, Any], steps: StepCount) -> WrappedLoader:
        return WrappedLoader(
            DataLoader(Numbers(), batch_size=4, shuffle=True, **options), clock=steps, skip=skip
        )

    torch.manual_seed(4)
    steps = StepCount()
    whole = loader(lost, steps)
    draw_and_go_on(whole, steps, upto=99, late=False)
    wanted = draw_and_go_on(whole, steps, upto=99, late=False)
    torch.manual_seed(4)
    steps = StepCount()
    cut = loader(lost, steps)
    draw_and_go_on(cut, steps, upto=99, late=False)
    seen = draw_and_go_on(cut, steps, upto=9, late=False)
    again, steps = in_another_process(cut, lambda steps: loader(resumed, steps), step=9)
    seen += draw_and_go_on(again, steps, upto=12, late=False)
    assert seen == wanted or "does not give what it gave in the lost process" in caplog.text
    assert seen == wanted or (skip == "replay" and resumed == {"num_workers": 2})


@pytest.mark.parametrize("taken", [0, 1], ids=["no batch", "a batch"])
def test_what_is_cut_before_a_resumed_pass_had_a_step_is_where_it_resumed(taken: int) -> None:
    """It was the very beginning, which nothing but the refusal of such saves kept from being stored."""
    torch.manual_seed(4)
    steps = StepCount()
    lost = WrappedLoader(DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1), clock=steps)
    draw_and_go_on(lost, steps, upto=3, late=False)
    tree = decode_value(encode_value(lost.capture()).to_bytes())
    again = WrappedLoader(DataLoader(Numbers(), batch_size=4, shuffle=True), clock=steps)
    again.resume(tree, capture_globals())
    batches = iter(again)
    for _ in range(taken):
        next(batches)
    assert again.capture() == tree
    next(batches)
    steps.now += 1
    later = again.capture()
    assert (later["delivered"], later["ahead"]) == (4 + taken, True)


def test_an_order_that_an_older_version_drew_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """It did not write down whether it had workers: with none in this process it may be another order."""
    torch.manual_seed(4)
    steps = StepCount()
    lost = WrappedLoader(DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1), clock=steps)
    draw_and_go_on(lost, steps, upto=3, late=False)
    tree = lost.capture()
    del tree["ahead"]
    again = WrappedLoader(DataLoader(Numbers(), batch_size=4, shuffle=True), clock=steps)
    again.resume(decode_value(encode_value(tree).to_bytes()), capture_globals())
    next(iter(again))
    assert "a process of an older version began" in caplog.text


def test_a_batch_fetched_after_the_last_step_is_not_used_up() -> None:
    """`break` after fetching: the boundary's position and randomness are cut."""
    torch.manual_seed(4)
    program = Program(LOADERS["noisy"])
    program.run(5)
    wanted = capture_globals()
    iterator = iter(program.loader)
    next(iterator)
    assert program.loader.moved
    tree = program.loader.capture()
    assert (tree["epoch"], tree["delivered"]) == (0, 5)
    rng = program.loader.boundary_rng()
    assert rng is not None
    assert rng["torch"] == wanted["torch"]


def test_a_pipeline_that_fetches_ahead_resumes_at_what_was_consumed() -> None:
    """Two batches ahead (TorchRec's pipeline): delivered is not consumed."""
    step = 0
    wrapped = WrappedLoader(list(range(10)), clock=lambda: step, pipelined=True)
    ahead = iter(wrapped)
    queue = [next(ahead), next(ahead)]
    for _ in range(4):
        queue.append(next(ahead))
        queue.pop(0)
        step += 1
    assert wrapped.capture()["delivered"] == 4
    again = WrappedLoader(list(range(10)), clock=lambda: step, pipelined=True)
    again.resume(wrapped.capture(), None)
    assert list(again) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("persistent", "stateful"), [(True, False), (False, False), (True, True)])
def test_persistent_workers_are_warned_of(
    caplog: pytest.LogCaptureFixture, persistent: bool, stateful: bool
) -> None:
    """Where they keep a resume from being exact, and nowhere else."""
    kind = StatefulDataLoader if stateful else DataLoader
    loader = kind(Numbers(), batch_size=4, num_workers=1, persistent_workers=persistent)
    WrappedLoader(loader, clock=lambda: 0)
    assert ("persistent_workers" in caplog.text) is (persistent and not stateful)


@contextmanager
def no_collector() -> Iterator[None]:
    """What is still there is in a cycle. Torch waits 5 s for each worker of a pass that the collector ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_within_an_epoch(loader: WrappedLoader) -> weakref.ref[WrappedLoader]:
    for _ in loader:
        break
    return weakref.ref(loader)


def test_a_pass_that_was_left_ends_with_its_loader() -> None:
    """Not at some collection later, with minutes of waiting where workers are many."""
    with no_collector():
        loader = WrappedLoader(DataLoader(Numbers(), batch_size=4), clock=lambda: 0)
        left = left_within_an_epoch(loader)
        del loader
        assert left() is None


def test_a_closed_checkpointer_holds_no_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a training that ends within an epoch, in a process that goes on."""
    net = nn.Embedding(30, 4, sparse=True)
    program = types.SimpleNamespace(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    with checkpointers(tmp_path, monkeypatch) as make:
        ckpt = make(program)
        loader = ckpt.wrap(DataLoader(Numbers(), batch_size=4))
        ckpt.restore()
        with no_collector():
            left = left_within_an_epoch(loader)
            ckpt.close()
            del loader
            assert left() is None


def test_epochs_are_counted() -> None:
    """`range(loader.epoch, epochs)` goes on where the lost run was."""
    step = 0
    wrapped = WrappedLoader([1, 2, 3], clock=lambda: step)
    assert wrapped.epoch == 0
    for epoch in range(2):
        assert wrapped.epoch == epoch
        for _ in wrapped:
            step += 1
    assert wrapped.epoch == 2
    step += 1
    again = WrappedLoader([1, 2, 3], clock=lambda: step)
    again.resume(wrapped.capture(), None)
    assert again.epoch == 2
    assert len(again) == 3


def test_evaluation_first_run_later_does_not_turn_the_clock_back() -> None:
    """A second loader resumed after steps leaves the global generators as they are."""
    step = 0
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    wrapped = WrappedLoader(loader, clock=lambda: step)
    iterator = iter(wrapped)
    next(iterator)
    step = 1
    tree, rng = wrapped.capture(), capture_globals()
    again = WrappedLoader(DataLoader(Numbers(), batch_size=4, shuffle=True), clock=lambda: step)
    again.resume(tree, rng)
    step = 5
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    iter(again)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("thing", [iter([1, 2]), 7])
def test_what_cannot_be_iterated_twice_is_refused(thing: Any) -> None:
    """With the remedy."""
    with pytest.raises(StateError):
        WrappedLoader(thing, clock=lambda: 0)


def test_another_kind_of_loader_is_refused_at_resume() -> None:
    """A stateful loader's state cannot be counted, and the other way round."""
    stateful = WrappedLoader(StatefulDataLoader(Numbers(), batch_size=4), clock=lambda: 0)
    next(iter(stateful))
    counted = WrappedLoader(DataLoader(Numbers(), batch_size=4), clock=lambda: 0)
    next(iter(counted))
    step_done = {"delivered": 1, "epoch": 0, "start": None, "inner": {"some": 1}}
    with pytest.raises(CheckpointMismatch):
        counted.resume(step_done, None)
    with pytest.raises(CheckpointMismatch):
        stateful.resume({**step_done, "inner": None}, None)


def test_a_pass_that_ends_in_its_only_step_is_an_epoch() -> None:
    """One step for all batches of a pass, behind the loop; a pass without a step is still none."""
    step = 0
    wrapped = WrappedLoader(DataLoader(list(range(6)), batch_size=2), clock=lambda: step)
    for epoch in range(3):
        for _ in wrapped:
            pass
        step += 1
        assert wrapped.epoch == epoch + 1
    for _ in wrapped:
        pass
    for _ in wrapped:
        step += 1
        assert wrapped.epoch == 3


def test_the_end_of_a_pass_is_no_batch_taken() -> None:
    """A save behind the loop is of the last step."""
    step = 0
    wrapped = WrappedLoader(DataLoader(list(range(6)), batch_size=2), clock=lambda: step)
    for _ in wrapped:
        assert wrapped.moved
        step += 1
        assert not wrapped.moved
    assert not wrapped.moved
