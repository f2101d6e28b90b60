"""Misuse of the trainer's API that once failed silently, waited for minutes, or raised an unrelated message."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deltashard.attach.launcher import ChildLauncher, SidecarOptions, environment_hash
from deltashard.errors import AnotherTrainer, CheckpointMismatch, UserError

from tests.incidents.toys import ROWS, Toy, ToyRun, checkpointer

SECRET = "the-corrected-secret"


@pytest.fixture(autouse=True)
def forked_sidecars() -> None:
    """Start sidecars as for users, because the tests check the process environment."""


def launcher(root: Path, **flags: object) -> ChildLauncher:
    return ChildLauncher(
        SidecarOptions(url=f"file://{root}/store", run="run", flags={"linger_s": 20.0, **flags})
    )


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with ToyRun(tmp_path / "store") as run:
        run.train(2)
        run.save()
    return tmp_path / "store"


def test_changed_environment_replaces_lingering_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that ended without close() and restarts with other credentials must not use the old sidecar."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    first = launcher(tmp_path)
    first.ensure()
    again = launcher(tmp_path)
    again.ensure()
    assert again.pid == first.pid, "the running sidecar is used: nothing changed"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    corrected = launcher(tmp_path)
    corrected.ensure()
    try:
        assert corrected.pid not in (None, first.pid)
        with pytest.raises(ProcessLookupError):
            os.kill(first.pid or 0, 0)
        assert SECRET in Path(f"/proc/{corrected.pid}/environ").read_bytes().decode()
        assert SECRET not in (corrected.runtime / "arguments.json").read_text()
    finally:
        for each in (corrected, again, first):
            each.close()


def test_sidecar_still_starting_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed trainer has just started a sidecar: the next trainer must not start a second one."""
    first = launcher(tmp_path)
    first.ensure()
    again = launcher(tmp_path)
    running_pid, first_answers = again._running_pid, iter([None])
    monkeypatch.setattr(again, "_running_pid", lambda: next(first_answers, running_pid()))
    again.ensure()
    try:
        assert again.pid == first.pid
        assert again._spawned == 1
        assert again.ready_path.exists(), "a later trainer could not find it"
    finally:
        for each in (again, first):
            each.close()


def test_environment_hash_covers_only_sidecar_variables() -> None:
    was = {"AWS_REGION": "eu", "MINIO_ACCESS_KEY": "a", "DELTASHARD_EVERY_S": "3", "PATH": "/bin"}
    for same in ({"PATH": "/usr/bin"}, {"DELTASHARD_CONTENT_HASH": "1"}, {"DELTASHARD_SOCKET": "/x"}):
        assert environment_hash(was | same, "s") == environment_hash(was, "s")
    for name in ("AWS_REGION", "MINIO_ACCESS_KEY", "DELTASHARD_EVERY_S", "SSL_CERT_FILE", "AWS_CA_BUNDLE"):
        assert environment_hash(was | {name: "other"}, "s") != environment_hash(was, "s")
    assert environment_hash(was, "s") != environment_hash(was, "t")


def test_closed_checkpointer_raises_immediately(stored: Path) -> None:
    """A restore does not search for a sidecar for minutes; steps and saves are rejected."""
    run = ToyRun(stored)
    run.ckpt.close()
    began_s = time.monotonic()
    for call in (run.ckpt.restore, run.ckpt.save, run.ckpt.step, run.ckpt.step):
        with pytest.raises(UserError, match="this Checkpointer is closed"):
            call()
    assert time.monotonic() - began_s < 30.0
    run.ckpt.close()


def test_second_restore_and_second_wrap_are_refused(stored: Path) -> None:
    """The first error must not read "after training began". A second wrap would resume the position twice."""
    with ToyRun(stored) as run:
        with pytest.raises(UserError, match="the model is already restored, to step 2"):
            run.ckpt.restore(which="step:2")
        loader = run.ckpt.wrap([1, 2, 3])
        with pytest.raises(UserError, match="this loader is wrapped already"):
            run.ckpt.wrap(loader, name="again")
        run.train(1)
        with pytest.raises(UserError, match="after training began"):
            run.ckpt.restore()


def test_invalid_settings_raise_user_error_with_remedy(tmp_path: Path) -> None:
    """Before and after the sidecar has its log, the error has place and remedy, no JSON and no "read its log"."""
    with pytest.raises(UserError) as caught:
        ToyRun(tmp_path / "store", encoding="q9")
    assert caught.value.what == "encoding is 'q9'"
    assert caught.value.where == "--encoding or DELTASHARD_ENCODING"
    assert caught.value.remedy.startswith("one of fp32")
    with pytest.raises(UserError) as caught:
        ToyRun("gopher://store", restore=False)
    assert "gopher" in str(caught.value)
    assert "{" not in str(caught.value)


def resized(stored: Path, *, rows: int = ROWS, width: int = 16, dtype: torch.dtype = torch.float32) -> Any:
    """Return a Checkpointer of a toy whose table has another size, and its model, without an optimizer."""
    model = Toy()
    model.items = torch.nn.EmbeddingBag(rows, width, mode="sum", sparse=True, dtype=dtype)
    return model, checkpointer(model, (), stored)


@pytest.mark.parametrize(
    ("change", "now"),
    [
        ({"rows": ROWS + 7}, f"[{ROWS + 7}, 16]"),
        ({"rows": ROWS - 7}, f"[{ROWS - 7}, 16]"),
        ({"width": 32}, f"[{ROWS}, 32]"),
        ({"dtype": torch.float64}, f"float64 [{ROWS}, 16]"),
    ],
)
def test_changed_table_error_names_both_shapes(stored: Path, change: dict[str, Any], now: str) -> None:
    _, ckpt = resized(stored, **change)
    try:
        with pytest.raises(CheckpointMismatch) as caught:
            ckpt.restore(weights_only=True)
    finally:
        ckpt.close()
    message = caught.value.what
    for part in ("items.weight", f"[{ROWS}, 16]", now):
        assert part in message
    assert not re.search("keep|converted|left out", message)
    assert "restore(strict=False)" in caught.value.remedy


def _another_class(model: Toy) -> list[torch.optim.Optimizer]:
    tables = torch.optim.SparseAdam([model.items.weight], lr=0.1)
    return [tables, torch.optim.Adam(model.head.parameters(), lr=0.01)]


def _other_groups(model: Toy) -> list[torch.optim.Optimizer]:
    groups = [{"params": [model.head.weight]}, {"params": [model.head.bias], "lr": 0.5}]
    return [torch.optim.Adagrad([model.items.weight], lr=0.1), torch.optim.Adam(groups, lr=0.01)]


@pytest.mark.parametrize(
    ("optimizers_of", "changed", "message", "note"),
    [
        (
            _another_class,
            0,
            r"optimizer 0 was a .*Adagrad and is a .*SparseAdam now",
            "SparseAdam.*without the checkpoint's state",
        ),
        (_other_groups, 1, "optimizer 1 had 1 parameter groups and has 2 now", "parameter groups"),
    ],
)
def test_changed_optimizer_receives_no_old_state(
    stored: Path, optimizers_of: Any, changed: int, message: str, note: str
) -> None:
    """Strict mode refuses by name and leaves the model unchanged. strict=False omits the state."""
    model = Toy()
    built = model.items.weight.detach().clone()
    optimizers = optimizers_of(model)
    groups = [dict(group) for group in optimizers[changed].param_groups]
    ckpt = checkpointer(model, optimizers, stored)
    try:
        with pytest.raises(CheckpointMismatch, match=message):
            ckpt.restore()
        assert torch.equal(model.items.weight, built)
        restored = ckpt.restore(strict=False)
        assert any(re.search(note, each) for each in restored.notes)
        assert not torch.equal(model.items.weight, built)
        assert not optimizers[changed].state
        assert [group["lr"] for group in optimizers[changed].param_groups] == [each["lr"] for each in groups]
        assert optimizers[1 - changed].state
        model(torch.arange(8).view(2, 4)).sum().backward()
        for each in optimizers:
            each.step()
        ckpt.step()
    finally:
        ckpt.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_second_checkpointer_of_run_in_process_is_refused(stored: Path) -> None:
    """A rerun notebook cell would make the two replace each other's session forever. close() permits it."""
    with ToyRun(stored) as first:
        with pytest.raises(AnotherTrainer, match="another Checkpointer of this process") as caught:
            ToyRun(stored)
        assert "close()" in caught.value.remedy
        first.train(1)
        assert first.save().step == 3, "the first Checkpointer is unaffected"
    with ToyRun(stored) as again:
        assert again.ckpt.steps == 3
