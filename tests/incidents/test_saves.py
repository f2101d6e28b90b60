"""Failures that other systems shipped, in saving: each test is named by who met it and shows that we do not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import deltashard
import numpy as np
import pytest
import torch
from deltashard.attach.launcher import runtime_dir
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_sidecar.main import notify

from tests.incidents.toys import ROWS, Run, assert_holds, checkpointer, newest_step, stored
from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.eventually import eventually
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import MinioServer


@pytest.mark.minio
def test_dlrover_1585_a_save_begun_while_one_uploads_never_touches_its_blocks(own_minio: MinioServer) -> None:
    """Save 1 hangs in its upload; training goes on and asks for save 2; both hold exactly their own step."""
    with FaultyProxy(own_minio.port) as proxy:
        url = own_minio.url(own_minio.new_bucket(), port=proxy.port)
        direct = url.replace(str(proxy.port), str(own_minio.port))
        with Run(url) as run:
            run.train(3)
            run.save()
            proxy.hang = True
            run.train(2)
            first = run.cut("first")
            at_first = run.state()
            run.train(4)
            second = run.ckpt.save("second")
            at_second_or_later = run.state()
            proxy.release()
            commit = first.wait(60)
            assert commit.step == 5
            assert_holds(read_checkpoint(open_store(direct), "run", f"seq:{commit.seq}"), at_first)
            commit = second.wait(60)
            assert commit.step == 9
            assert_holds(read_checkpoint(open_store(direct), "run", f"seq:{commit.seq}"), at_second_or_later)


def test_deeprec_1023_weights_and_optimizer_slots_belong_to_one_step(tmp_path: Path) -> None:
    """A trainer that never pauses: every (w, m) pair restored is the pair of one and the same step.

    After step s every touched weight of this optimizer is s and its slot s * s: a mixed pair cannot hide.
    """

    class Counting(torch.optim.Optimizer):
        def __init__(self, params: list[torch.nn.Parameter]) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            param = self.param_groups[0]["params"][0]
            state = self.state[param]
            state.setdefault("slot", torch.zeros_like(param))
            state["n"] = state.get("n", 0) + 1
            param.fill_(float(state["n"]))
            state["slot"].fill_(float(state["n"] ** 2))

    model = torch.nn.Embedding(20_000, 16)
    optimizer = Counting([model.weight])
    with checkpointer(model, optimizer, tmp_path / "store", every_steps=3) as ckpt:
        ckpt.restore()
        deadline = time.monotonic() + 120
        while ckpt.stats.commits < 6 and time.monotonic() < deadline:
            optimizer.step()
            ckpt.step()
    store = open_store(f"file://{tmp_path}/store")
    state = RunLog(store, "run").refresh()
    assert len(state.checkpoints) >= 2
    for seq, entry in state.checkpoints.items():
        table = read_checkpoint(store, "run", f"seq:{seq}").tables["weight"]
        assert np.all(table.weights == entry.step)
        assert np.all(table.fields["slot"] == entry.step**2)


def test_pytorch_144657_tensors_mutated_right_after_the_cut(tmp_path: Path) -> None:
    """Everything is overwritten the instant `save()` returns: the checkpoint has the old values."""
    with Run(tmp_path / "store") as run:
        run.train(4)
        handle = run.ckpt.save("now")
        before = run.state()
        with torch.no_grad():
            run.model.items.weight.fill_(-7.0)
            run.model.head.weight.fill_(-7.0)
            run.tables.state[run.model.items.weight]["sum"].fill_(-7.0)
        handle.wait(60)
        assert_holds(stored(tmp_path / "store"), before)


def row_lengths(state: dict[str, np.ndarray]) -> np.ndarray:
    return np.linalg.norm(state["weights"], axis=1)


def test_torchrec_4322_content_of_the_cut_is_content_of_what_is_restored(tmp_path: Path) -> None:
    """At every encoding the restore proves, by the hash recorded at the cut, that it brought back what was cut.

    The hash is of the staged rows, so the model itself is asked as well: it would not see a row that was staged wrong.
    """
    for encoding in ("fp32", "q8", "q4", "q2"):
        url = tmp_path / encoding
        with Run(url, encoding=encoding) as run:
            run.train(3)
            run.save()
            run.train(3)
            run.save()
            was = run.state()
        with Run(url, encoding=encoding) as again:
            assert again.resumed.verified is True
            now = again.state()
        assert np.array_equal(now["sum"], was["sum"])
        assert np.array_equal(now["head"], was["head"])
        error = np.linalg.norm(now["weights"] - was["weights"], axis=1)
        # A row of zeros, or another row, is as far away as the row is long.
        assert np.all(error <= {"fp32": 0.0, "q8": 0.02, "q4": 0.2, "q2": 0.7}[encoding] * row_lengths(was))


def test_kempnerforge_102_the_old_checkpoint_is_whole_until_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between upload and commit, with keep_last=1: the one before is there, whole."""
    monkeypatch.setenv("DELTASHARD_CRASH_AT", "commit.before_log_put:2")
    with Run(tmp_path / "store", keep_last=1) as run:
        run.train(3)
        run.save()
        before = run.state()
        run.train(3)
        with pytest.raises(deltashard.SaveFailed):
            run.save()
        assert newest_step(tmp_path / "store") == 3
        assert_holds(stored(tmp_path / "store"), before)


def test_nemo_rl_3312_two_saves_with_changes_between_differ_where_they_must(tmp_path: Path) -> None:
    """Each save holds its own step's values, in tables, optimizer state, dense parameters and step."""
    with Run(tmp_path / "store", differential="full") as run:
        run.train(2)
        run.save()
        first = run.state()
        run.train(2)
        run.save()
        second = run.state()
    a, b = sorted(RunLog(open_store(f"file://{tmp_path}/store"), "run").refresh().checkpoints)
    assert_holds(stored(tmp_path / "store", f"seq:{a}"), first)
    assert_holds(stored(tmp_path / "store", f"seq:{b}"), second)
    assert not np.array_equal(first["weights"], second["weights"])
    assert not np.array_equal(first["head"], second["head"])


@pytest.mark.minio
def test_megatron_1435_store_down_for_a_while_loses_no_step_and_the_next_save_covers(
    own_minio: MinioServer,
) -> None:
    """The store goes away under a trainer that saves: every step is trained, the save after it covers all rows."""
    url = own_minio.url(own_minio.new_bucket())
    with Run(url, every_steps=2) as run:
        run.train(3)
        run.save()
        own_minio.kill()
        for _ in range(40):
            run.train(1)
        assert run.ckpt.steps == 43, "training lost no step"
        own_minio.start()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            run.train(1)
            if run.ckpt.stats.last_commit is not None and run.ckpt.stats.last_commit.step > 43:
                break
        handle = run.ckpt.save("after")
        state = run.state()
        commit = handle.wait(90)
        assert_holds(read_checkpoint(open_store(url), "run", f"seq:{commit.seq}"), state)


def test_megatron_1435_sidecar_gone_is_survived_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar dies with a save in flight: training goes on, a new one comes, the next save covers everything.

    Consecutive deltas: rows of the lost save that nobody touches again are in no other.
    """
    monkeypatch.setenv("DELTASHARD_CRASH_AT", "commit.before_log_put:2")
    with Run(tmp_path / "store", differential="consecutive") as run:
        run.train(2)
        run.save()
        first = run.ckpt.sidecar_pid
        run.train(3)
        with pytest.raises(deltashard.SaveFailed):
            run.save()
        run.train(20)
        eventually(
            lambda: (run.train(1), run.kinds("attached"))[1], timeout_s=60, what="the library attached again"
        )
        assert run.ckpt.sidecar_pid != first
        assert run.kinds("sidecar_lost")
        assert run.kinds("save_failed")
        state_before = run.ckpt.steps
        commit = run.save()
        assert commit.step == state_before
        assert not commit.baseline
        assert_holds(stored(tmp_path / "store"), run.state())


@pytest.mark.minio
def test_nvrx_373_a_stalled_store_never_makes_training_wait(own_minio: MinioServer) -> None:
    """The store accepts connections and never answers: steps stay fast, nothing hangs, close() ends by its deadline."""
    with FaultyProxy(own_minio.port) as proxy:
        url = own_minio.url(own_minio.new_bucket(), port=proxy.port)
        run = Run(url, every_steps=2)
        run.train(3)
        run.save()
        proxy.hang = True
        run.train(60)
        assert run.ckpt.steps == 63
        assert len(run.kinds("cut")) >= 1
        began = time.monotonic()
        with pytest.raises(deltashard.SaveFailed):
            run.ckpt.close(deadline_s=3)
        assert time.monotonic() - began < 30
        proxy.release()


@pytest.mark.minio
def test_an_urgent_notice_while_a_save_uploads_costs_no_step_and_is_kept(own_minio: MinioServer) -> None:
    """A spot notice during a hanging upload: steps stay fast, no save is refused; the urgent cut follows the upload."""
    with FaultyProxy(own_minio.port) as proxy:
        url = own_minio.url(own_minio.new_bucket(), port=proxy.port)
        with Run(url) as run:
            run.train(3)
            run.save()
            proxy.hang = True
            run.train(2)
            first = run.cut("first")
            socket = runtime_dir(url, "run") / "sidecar.sock"
            refused = len(run.kinds("save_failed"))
            assert notify(["--socket", str(socket), "--reason", "eviction"]) == 0
            began = time.monotonic()
            run.train(30)
            # Each urgent cut that is refused costs its step three seconds.
            assert time.monotonic() - began < 60.0
            assert len(run.kinds("save_failed")) == refused
            assert run.ckpt.steps == 35
            proxy.release()
            assert first.wait(60).step == 5
            run.train(1)
            assert [facts["reason"] for facts in run.kinds("cut")][-1] == "eviction"


def test_kubectl_1739_close_blocks_until_durable_and_raises(tmp_path: Path) -> None:
    """What `close()` returned from is in the log; when it cannot be, `close()` raises."""
    run = Run(tmp_path / "store")
    run.train(5)
    run.ckpt.close()
    assert newest_step(tmp_path / "store") == 5

    run = Run(tmp_path / "store")
    run.train(1)
    (tmp_path / "store").rename(tmp_path / "gone")
    (tmp_path / "store").write_text("not a directory")
    with pytest.raises(deltashard.DeltashardError):
        run.ckpt.close(deadline_s=5)


@pytest.mark.timeout(900)
def test_xtuner_1859_file_descriptors_are_constant_over_many_saves(tmp_path: Path) -> None:
    """60 saves of a real trainer: neither it nor its sidecar holds more descriptors at the end (200: see sidecar)."""

    def open_files(pid: int | None) -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    with Run(tmp_path / "store", encoding="q8", keep_last=2) as run:
        run.train(1)
        for _ in range(20):
            run.train(1)
            run.save()
        here, there = open_files(os.getpid()), open_files(run.ckpt.sidecar_pid)
        for _ in range(40):
            run.train(1)
            run.save()
        # The streams of the last save may still be ending.
        eventually(lambda: open_files(os.getpid()) <= here + 2, timeout_s=60, what="no more descriptors here")
        eventually(lambda: open_files(run.ckpt.sidecar_pid) <= there + 2, timeout_s=60, what="no more there")
        assert run.model.items.weight.shape[0] == ROWS
