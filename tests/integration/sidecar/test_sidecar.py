"""A real sidecar process and a small trainer: the whole contract, on file:// and on the real MinIO."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.word import rewind
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP, URGENT
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.main import EXIT_OWNED

from tests.support.eventually import eventually
from tests.support.fake_trainer import Model, SaveRefused, SidecarProcess, Trainer, same, sidecar
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import MinioServer


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def process(tmp_path: Path, url: str) -> Iterator[SidecarProcess]:
    with sidecar(tmp_path, url, encoding="fp32", metrics_port=0) as one:
        yield one


@pytest.fixture
def trainer(process: SidecarProcess) -> Iterator[Trainer]:
    one = Trainer(process.socket, Model())
    one.open()
    yield one
    one.close()


def metric(process: SidecarProcess, name: str) -> float:
    """The value of one sample."""
    page = (
        urllib.request.urlopen(f"http://127.0.0.1:{process.ready()['metrics_port']}/metrics", timeout=60)
        .read()
        .decode()
    )
    found = re.search(rf"^{re.escape(name)} ([0-9.e+-]+)$", page, re.MULTILINE)
    assert found, f"{name} not in\n{page}"
    return float(found[1])


def blocks(process: SidecarProcess, use: str) -> int:
    return int(metric(process, f'deltashard_arena_blocks{{use="{use}"}}'))


# The process.


def test_the_command_line(tmp_path: Path, url: str) -> None:
    """Silent on stdout, ready.json when it serves, health and notify answer, one owner a directory, SIGTERM leaves nothing."""
    command = [sys.executable, "-m", "deltashard_sidecar.main"]
    flags = ["--url", url, "--run", "r", "--dir", str(tmp_path / "d"), "--cache-dir", str(tmp_path / "c")]
    flags += ["--arena-bytes", "32MiB", "--metrics-port", "0"]
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        first = subprocess.Popen([*command, "serve", *flags], stdout=subprocess.PIPE, stderr=stderr)
    try:
        ready = tmp_path / "d/ready.json"
        eventually(ready.exists)
        facts = json.loads(ready.read_text())
        assert facts["pid"] == first.pid
        assert set(facts) == {"pid", "epoch", "metrics_port", "protocol"}
        socket = ["--socket", str(tmp_path / "d/sidecar.sock")]
        eventually(
            lambda: subprocess.run([*command, "health", *socket], check=False).returncode == 0, what="healthy"
        )

        def notified() -> bool:
            """Whether it was heard: the hook gives up, and says nothing, where the sidecar is too busy to answer."""
            hook = [*command, "notify", "--reason", "eviction", *socket]
            assert subprocess.run(hook, check=False).returncode == 0
            return '"notified"' in log.read_text()

        eventually(notified, what="the sidecar hears of the hook")
        second = subprocess.run([*command, "serve", *flags], capture_output=True, check=False)
        assert second.returncode == EXIT_OWNED
        assert json.loads(ready.read_text())["pid"] == first.pid
        first.terminate()
        out, _ = first.communicate(timeout=60)
        assert (first.returncode, out) == (0, b"")
        assert all(json.loads(line)["run"] == "r" for line in log.read_text().splitlines())
        assert not ready.exists()
        assert not (tmp_path / "d/sidecar.sock").exists()
        assert subprocess.run([*command, "health", *socket], check=False).returncode == 1
    finally:
        first.kill()
        first.communicate()


def test_the_sidecar_imports_no_torch() -> None:
    """None of its modules does, directly or not."""
    code = """
import pkgutil, importlib, sys, deltashard_sidecar
for m in pkgutil.iter_modules(deltashard_sidecar.__path__): importlib.import_module(f"deltashard_sidecar.{m.name}")
sys.exit("torch" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


Coming = Callable[[SidecarProcess], Trainer]


@contextmanager
def lingering(
    tmp_path: Path, url: str, coming: Callable[[], Coming]
) -> Iterator[tuple[SidecarProcess, Trainer, int]]:
    """A sidecar that lingers, its trainer, and for how many seconds it does.

    `coming` makes, before the sidecar starts, what brings the trainer. Where a busy machine does that only after the
    sidecar has lingered, it is done once more, with one that lingers longer.
    """
    longest_s = 100
    for linger_s in (4, 20, longest_s):
        come = coming()
        root = tmp_path / f"{linger_s}"
        root.mkdir()
        with sidecar(root, url, wait=False, encoding="fp32", linger_s=linger_s) as process:
            try:
                trainer = come(process)
            except Exception:
                if linger_s == longest_s or "sidecar.lingered" not in process.log():
                    raise
                continue
            yield process, trainer, linger_s
            return


def test_it_lingers_only_without_a_trainer(tmp_path: Path, url: str) -> None:
    """An orphan of a laptop exits; while a trainer is attached it stays."""

    def attached(process: SidecarProcess) -> Trainer:
        process.ready()
        trainer = Trainer(process.socket, Model())
        trainer.open()
        return trainer

    with lingering(tmp_path, url, lambda: attached) as (process, trainer, linger_s):
        trainer.save_and_commit()
        with pytest.raises(AssertionError, match="not within"):
            eventually(lambda: process.poll() is not None, within_s=linger_s + 1.0)
        trainer.detach()
        assert process.died() == 0
        trainer.close()


def test_one_that_does_not_linger_stays_with_its_trainer(tmp_path: Path, url: str) -> None:
    """linger_s=0: it ends when the trainer left, not at its first look."""
    with sidecar(tmp_path, url, encoding="fp32", linger_s=0) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        with pytest.raises(AssertionError, match="not within"):
            eventually(lambda: process.poll() is not None, within_s=2.0)
        trainer.save_and_commit()
        trainer.detach()
        assert process.died() == 0
        trainer.close()


def test_a_killed_trainer_is_no_trainer(tmp_path: Path, url: str) -> None:
    """Its lock and its stream are gone, whatever killed it: the lingering sidecar exits."""
    code = (
        "import sys,os,signal;from pathlib import Path;from tests.support.fake_trainer import Model,Trainer;"
        "print('ready',flush=True);t=Trainer(Path(input()),Model());t.open();os.kill(os.getpid(),signal.SIGKILL)"
    )

    def after_another() -> Coming:
        killed = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[3],
        )  # fmt: skip
        assert killed.stdout is not None
        # A Python that starts slowly is no part of the lingering.
        assert killed.stdout.readline() == "ready\n"

        def come(process: SidecarProcess) -> Trainer:
            try:
                process.ready()
                killed.communicate(f"{process.socket}\n", timeout=120)
                assert killed.returncode == -signal.SIGKILL
            finally:
                killed.kill()
                killed.communicate()
            trainer = Trainer(process.socket, Model())
            assert trainer.open().attempt > 1
            return trainer

        return come

    with lingering(tmp_path, url, after_another) as (process, trainer, _):
        trainer.detach()
        trainer.close()
        assert process.died() == 0


# Streams and messages of a cut.


def test_descriptors_that_travel_with_the_seal(trainer: Trainer) -> None:
    """The whole cut in one message is the same cut."""
    trainer.model.train()
    cut = trainer.begin(together=True)
    cut.write_all()
    cut.seal()
    kept = trainer.model.state()
    commit = trainer.committed(cut.number)
    trainer.model.wipe()
    trainer.restore(commit.seq)
    assert same(trainer.model.state(), kept)


@pytest.mark.parametrize("inner", ["begin", "abort", "several", "ready"])
def test_what_may_not_travel_together_fails_its_save_only(trainer: Trainer, inner: str) -> None:
    """A message that is no descriptor and no seal among several: this save is invalid, the next one commits."""
    cut = trainer.begin(together=True)
    request = pb.SaveRequest()
    getattr(request, inner).SetInParent()
    cut.send(request)
    cut.write_all()
    with pytest.raises(SaveRefused) as refused:
        cut.seal()
    assert refused.value.cause == "invalid"
    trainer.save_and_commit()


def test_a_stream_that_never_begins_costs_nothing(process: SidecarProcess, trainer: Trainer) -> None:
    """Open ahead of a cut that never comes: saves go by on other streams, and detaching ends it."""
    outbox: queue.SimpleQueue[pb.SaveRequest | None] = queue.SimpleQueue()
    outbox.put(pb.SaveRequest(ready=pb.SaveRequest.Ready(session=trainer.reply.session)))
    idle = trainer.stub.Save(iter(outbox.get, None))
    trainer.save_and_commit()
    assert blocks(process, "quarantined") == 0
    trainer.detach()
    with pytest.raises(grpc.RpcError) as ended:
        next(idle)
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    outbox.put(None)


# Attach.


def test_attach_refuses_what_cannot_be_served(process: SidecarProcess, tmp_path: Path) -> None:
    """Each refusal says what to change."""
    model = Model()
    good = Trainer(process.socket, model)
    request = pb.AttachRequest(protocol_min=7, protocol_max=9, world_size=1)
    with pytest.raises(grpc.RpcError, match="trainer speaks 7-9, this sidecar 1-1"):
        good.stub.Attach(request)
    request = pb.AttachRequest(protocol_min=1, protocol_max=1, rank=3, world_size=2)
    with pytest.raises(grpc.RpcError, match="rank 3 of world size 2"):
        good.stub.Attach(request)
    request = pb.AttachRequest(protocol_min=1, protocol_max=1, world_size=1, local_rank=1, blob_bytes=1 << 40)
    with pytest.raises(grpc.RpcError, match="arena .* and the cache .* hold"):
        good.stub.Attach(request)
    good.close()
    group = [Trainer(process.socket, model, rank=rank, world_size=3) for rank in range(2)]
    with pytest.raises(grpc.RpcError, match="too few for 3 trainers"):
        Trainer(process.socket, model, rank=2, world_size=3)
    for each in group:
        each.close()


def test_a_rank_is_one_process(process: SidecarProcess, trainer: Trainer) -> None:
    """A second live process of a rank is told who has it; the same process may attach anew, and the old session ends."""
    request = pb.AttachRequest(protocol_min=1, protocol_max=1, world_size=1, pid=os.getpid() + 1)
    with pytest.raises(grpc.RpcError, match=f"process {os.getpid()} trains as local rank 0"):
        trainer.stub.Attach(request, timeout=60)
    old = trainer.reply.session
    trainer.attach()
    with pytest.raises(grpc.RpcError, match="UnknownSession"):
        trainer.stub.Detach(pb.DetachRequest(session=old))
    trainer.save_and_commit()


# Saves.


def test_saves_restore_exactly(trainer: Trainer) -> None:
    """Baseline, deltas over it, a new baseline when the predictor says so; each restores to what was cut."""
    kinds = []
    for _ in range(6):
        trainer.model.train(0.3)
        state = trainer.model.state()
        commit = trainer.save_and_commit()
        kinds.append(commit.baseline)
        trainer.model.wipe()
        trainer.restore(commit.seq)
        assert same(trainer.model.state(), state)
    assert kinds[0]
    assert not kinds[1]
    assert any(kinds[2:])


def test_frames_come_in_batches_to_a_trainer_that_takes_them(trainer: Trainer) -> None:
    """Those of one range in one message, and each once."""
    trainer.model.train(0.3)
    state = trainer.model.state()
    commit = trainer.save_and_commit()
    trainer.model.wipe()
    trainer.restore(commit.seq)
    assert same(trainer.model.state(), state)
    assert max(len(batch) for batch in trainer.batches_read) > 1
    frames = [each for batch in trainer.batches_read for each in batch]
    assert len(set(frames)) == len(frames)


def test_a_cut_larger_than_the_arena(tmp_path: Path, url: str) -> None:
    """It goes on at encoding speed: blocks come back as their batches are encoded."""
    with sidecar(tmp_path, url, encoding="q8", arena_bytes="32MiB", metrics_port=0) as process:
        trainer = Trainer(process.socket, Model(rows=300_000, columns=32))
        trainer.open()
        cut = trainer.begin()
        assert cut.begun is not None
        assert cut.begun.stall_budget_s == 0, (
            "it can only go on as fast as it is encoded: no limit from the start"
        )
        cut.write_all()
        cut.seal()
        assert cut.blocks_used * 8 > 64
        commit = trainer.committed(cut.number)
        assert commit.raw_bytes > 64 << 20
        assert blocks(process, "free") == 4
        weights = trainer.model.tables[0].weights.copy()
        sums = trainer.model.tables[0].sums.copy()
        trainer.model.wipe()
        done = trainer.restore(commit.seq)
        assert done.store_bytes == 0
        assert np.abs(trainer.model.tables[0].weights - weights).max() < 0.05
        assert np.array_equal(trainer.model.tables[0].sums, sums)
        trainer.close()


def test_an_aborted_save_frees_its_blocks_at_once(process: SidecarProcess, trainer: Trainer) -> None:
    """The trainer's abort is its word that nothing is written any more; two for the stall, and the next waits it out."""
    for _ in range(2):
        cut = trainer.begin()
        assert cut.begun is not None
        assert cut.begun.stall_budget_s > 0
        cut.rows_of(0, None)
        cut.abort("stall_budget")
        assert cut.end is not None
        assert cut.end.failed.cause == "stall_budget"
    eventually(lambda: blocks(process, "free") == 8)
    cut = trainer.begin()
    assert cut.begun is not None
    assert cut.begun.stall_budget_s == 0
    cut.write_all()
    cut.seal()
    trainer.committed(cut.number)
    assert metric(process, 'deltashard_save_failures_total{cause="stall_budget"}') == 2
    again = trainer.begin()
    assert again.begun is not None
    assert again.begun.stall_budget_s > 0
    again.abort()


def test_blocks_of_a_broken_stream_are_quarantined(process: SidecarProcess, trainer: Trainer) -> None:
    """While the trainer lives it may still be writing: nobody gets its blocks until it begins anew."""
    cut = trainer.begin()
    cut.rows_of(0, None)
    cut.vanish()
    eventually(lambda: blocks(process, "quarantined") > 0)
    held = blocks(process, "quarantined")
    with pytest.raises(AssertionError, match="not within"):
        eventually(lambda: blocks(process, "quarantined") < held, within_s=0.5)
    state = trainer.model.state()
    commit = trainer.save_and_commit()
    assert blocks(process, "quarantined") == 0
    trainer.model.wipe()
    trainer.restore(commit.seq)
    assert same(trainer.model.state(), state)


class Prepared:
    """A Save stream that asked for blocks ahead of its cut, and has them."""

    def __init__(self, trainer: Trainer) -> None:
        self.outbox: queue.SimpleQueue[pb.SaveRequest | None] = queue.SimpleQueue()
        self.call = trainer.stub.Save(iter(self.outbox.get, None), timeout=60)
        self.begin = pb.SaveRequest.Begin(session=trainer.reply.session, cut=trainer.cut + 1, reason="ahead")
        self.outbox.put(pb.SaveRequest(ready=pb.SaveRequest.Ready(session=trainer.reply.session)))
        self.outbox.put(pb.SaveRequest(prepare=pb.SaveRequest.Prepare(begin=self.begin)))
        self.answer = next(self.call).prepared
        self.granted = [] if self.answer.refused else list(next(self.call).blocks.granted)

    def abort(self) -> None:
        """The trainer's word that nothing is being copied."""
        self.outbox.put(pb.SaveRequest(abort=pb.SaveRequest.Abort(cause="no cut")))
        self.outbox.put(None)


def test_blocks_granted_ahead_go_back_at_an_abort(process: SidecarProcess, trainer: Trainer) -> None:
    """Until then they are the trainer's; no save was begun."""
    prepared = Prepared(trainer)
    assert not prepared.answer.HasField("covers")
    assert prepared.granted
    assert blocks(process, "granted") == len(prepared.granted)
    prepared.abort()
    assert list(prepared.call) == []
    eventually(lambda: blocks(process, "granted") == 0)
    assert blocks(process, "quarantined") == 0
    trainer.save_and_commit()


def test_blocks_granted_ahead_are_quarantined_where_the_stream_breaks(
    process: SidecarProcess, trainer: Trainer
) -> None:
    """The trainer may still be copying into them, until it begins anew: with a save, or another copy ahead."""
    for _ in range(2):
        prepared = Prepared(trainer)
        prepared.call.cancel()
        eventually(lambda: blocks(process, "quarantined") > 0 == blocks(process, "granted"))
    again = Prepared(trainer)
    assert len(again.granted) == len(prepared.granted)
    assert blocks(process, "quarantined") == 0
    again.abort()
    trainer.save_and_commit()


def test_a_cut_goes_on_with_the_blocks_that_were_granted_ahead(
    process: SidecarProcess, trainer: Trainer
) -> None:
    """They are the save's from its begin; beside a save in flight none are granted ahead."""
    trainer.save_and_commit()
    began: list[Prepared] = []

    def begins() -> bool:
        """Or is told to ask again: that the save before is over may not have been told to all."""
        prepared = Prepared(trainer)
        prepared.outbox.put(pb.SaveRequest(begin=prepared.begin))
        reply = next(prepared.call)
        if reply.WhichOneof("kind") == "begun":
            began.append(prepared)
        else:
            assert reply.failed.cause == "busy"
            prepared.outbox.put(None)
        return bool(began)

    eventually(begins, what="the cut begins")
    (prepared,) = began
    held = len(prepared.granted)
    assert held
    assert blocks(process, "granted") >= held
    assert "in flight" in Prepared(trainer).answer.refused
    prepared.abort()
    assert next(reply for reply in prepared.call if reply.HasField("failed")).failed.cause == "aborted"
    eventually(lambda: blocks(process, "granted") == 0)


def test_blocks_of_an_older_epoch_wait_for_their_writer(tmp_path: Path, url: str) -> None:
    """A restarted sidecar gives nothing out while a writer of before holds its lock and has not attached again."""
    first = SidecarProcess(tmp_path, url, encoding="fp32", metrics_port=0)
    trainer = Trainer(first.socket, Model(), world_size=2)
    boxes = [table.box for table in trainer.model.tables]
    layout = Layout.of(2, {b.table: (b.row_stop, b.col_stop) for b in boxes}, {0: boxes})
    trainer.layout = trainer.open(layout=layout.data).layout
    trainer.begin().rows_of(0, None)
    first.kill()
    with sidecar(tmp_path, url, encoding="fp32", metrics_port=0) as second:
        other = Trainer(
            second.socket, Model(), rank=1, world_size=2, attempt=trainer.attempt, layout=layout.digest
        )
        cut = other.begin()
        assert cut.granted.empty(), "rank 0 still holds its lock from the older epoch"
        trainer.attach()
        eventually(lambda: not cut.granted.empty(), what="blocks after rank 0 attached again")
        cut.abort()
        other.close()
        trainer.close()


def test_bad_descriptors_fail_their_save_only(process: SidecarProcess, trainer: Trainer) -> None:
    """Every number of a descriptor is checked before it becomes an address."""
    good = {"table": 0, "rows": 10, "contiguous": True, "col_start": 0, "col_stop": 8}
    for bad in (
        {"block": 99}, {"offset": 8 << 20}, {"offset": 1}, {"table": 7}, {"rows": 0}, {"rows": 1 << 62},
        {"row_start": 295}, {"col_stop": 9}, {"col_start": 8}, {"contiguous": False},
    ):  # fmt: skip
        cut = trainer.begin()
        block = cut.granted.get(timeout=60)
        message = {**good, "block": block, **bad}
        cut.outbox.put(pb.SaveRequest(rows=pb.RowBatch(**message)))
        if bad == {"contiguous": False}:  # ids [0, 0, ...] are not ascending: found by the encoder
            trainer.arena.block(block)[:80] = bytes(80)
            cut.outbox.put(pb.SaveRequest(seal=pb.SaveRequest.Seal(rows=10)))
        eventually(lambda c=cut: c.end is not None)
        cut.outbox.put(None)
        if bad != {"contiguous": False}:
            assert cut.end is not None
            assert cut.end.failed.cause == "invalid"
        else:
            eventually(lambda c=cut: c.number in trainer.failures or c.end.WhichOneof("kind") == "failed")
        assert cut.over.wait(60)
    trainer.save_and_commit()
    assert process.poll() is None


def test_rows_that_never_arrived_fail_the_save(trainer: Trainer) -> None:
    """The seal says how many rows were sent; another number is never committed."""
    cut = trainer.begin()
    cut.write_all()
    cut.rows += 1
    cut.seal()
    with pytest.raises(SaveRefused, match="341 rows were sealed, 340 arrived"):
        trainer.committed(cut.number)


def test_a_silent_trainer_loses_its_save(tmp_path: Path, url: str) -> None:
    """A hung trainer is no reason to hold the arena for ever."""
    with sidecar(tmp_path, url, encoding="fp32", stream_idle_s=4) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        cut = trainer.begin()
        assert cut.over.wait(60)
        assert cut.end is not None
        assert cut.end.failed.cause == "deadline"
        trainer.save_and_commit()
        trainer.close()


def test_one_save_in_flight_and_urgent_ones(trainer: Trainer, process: SidecarProcess) -> None:
    """A second save is busy; an urgent one takes the place of one that stages."""
    first = trainer.begin(reason="timer")
    with pytest.raises(SaveRefused, match="busy"):
        trainer.begin()
    assert metric(process, "deltashard_saves_skipped_total") == 1
    urgent = trainer.begin(reason="eviction", urgent=True)
    assert first.over.wait(60)
    assert first.end is not None
    assert first.end.failed.cause == "superseded"
    urgent.write_all()
    urgent.seal()
    assert trainer.committed(urgent.number).baseline


def test_notify_asks_every_trainer_to_save_now(trainer: Trainer, process: SidecarProcess) -> None:
    """The preStop hook's call: a notice, and the control line says urgent until a save begins."""
    line = trainer.arena.line(0)
    assert line[SAVE_AT_STEP] == NEVER
    assert trainer.stub.Notify(pb.NotifyRequest(reason="eviction", deadline_s=9)).trainers == 1
    eventually(lambda: trainer.urgent)
    assert trainer.urgent[0].reason == "eviction"
    assert trainer.urgent[0].urgent
    eventually(lambda: line[URGENT] == 1 and line[SAVE_AT_STEP] <= trainer.model.step)
    trainer.save_and_commit(urgent=True)
    eventually(lambda: line[URGENT] == 0 and line[SAVE_AT_STEP] == NEVER)


def test_the_timer_writes_the_control_line(tmp_path: Path, url: str) -> None:
    """every_steps is known ahead; nothing is due before the attempt is open."""
    with sidecar(tmp_path, url, encoding="fp32", every_steps=5) as process:
        trainer = Trainer(process.socket, Model())
        line = trainer.arena.line(0)
        assert line[SAVE_AT_STEP] == NEVER
        trainer.open()
        eventually(lambda: line[SAVE_AT_STEP] == 5)
        for _ in range(5):
            trainer.model.train()
            trainer.stepped()
        trainer.save_and_commit(reason="steps")
        eventually(lambda: line[SAVE_AT_STEP] == 10)
        trainer.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fd_and_memory_do_not_grow(tmp_path: Path, url: str) -> None:
    """Over 200 saves the same number of descriptors, and less than 256 MiB beyond the arena."""
    with sidecar(tmp_path, url, encoding="q8", metrics_port=0) as process:
        trainer = Trainer(process.socket, Model(rows=50))
        trainer.open()
        me = psutil.Process(process.pid)
        counts = 0, 0
        for i in range(200):
            trainer.model.train()
            try:
                trainer.save_and_commit()
            except (
                SaveRefused
            ) as refused:  # the stream before is still closing: on a busy machine a save is skipped
                assert refused.cause == "busy"  # noqa: PT017
            if i == 99:
                counts = me.num_fds(), me.num_threads()
        # The threads of the last streams may still be ending.
        eventually(lambda: me.num_fds() <= counts[0] + 2, what=f"no more descriptors than {counts}")
        eventually(lambda: me.num_threads() <= counts[1] + 4, what=f"no more threads than {counts}")
        status = Path(f"/proc/{process.pid}/status").read_text()
        anonymous = int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])  # type: ignore[index]
        assert anonymous < 256 << 10, status
        trainer.close()


# Fencing, fallback, warm starts.


def test_a_fenced_trainer_is_told_and_the_sidecar_serves_on(tmp_path: Path, url: str) -> None:
    """Another pod opened an attempt: this one's save fails as fenced, every later one is refused, a new attempt works."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with (
        sidecar(tmp_path / "a", url, encoding="fp32") as a,
        sidecar(tmp_path / "b", url, encoding="fp32") as b,
    ):
        old, new = Trainer(a.socket, Model()), Trainer(b.socket, Model())
        old.open()
        new.open()
        with pytest.raises(SaveRefused, match="fenced"):
            old.save_and_commit()
        eventually(lambda: old.fenced)
        assert (old.fenced[0].attempt, old.fenced[0].by) == (old.attempt, new.attempt)
        with pytest.raises(SaveRefused, match="fenced"):
            old.begin()
        new.save_and_commit()
        assert old.open().resume_seq
        old.save_and_commit()
        old.close()
        new.close()


def test_an_invalid_checkpoint_is_said_and_excluded(tmp_path: Path, url: str) -> None:
    """Flipped bits in the store: the restore fails as invalid, the next attempt excludes it and comes back from the older."""
    with sidecar(tmp_path, url, encoding="fp32", differential="full") as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        good = trainer.save_and_commit()
        state = trainer.model.state()
        trainer.model.train()
        bad = trainer.save_and_commit()
        trainer.close()
        process.kill()
    shutil.rmtree(tmp_path / "cache")
    for pack in (tmp_path / "store/run/data" / f"{bad.attempt:020d}" / f"{bad.cut:08d}").glob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.chmod(0o600)
        pack.write_bytes(data)
    with sidecar(tmp_path, url, encoding="fp32") as process:
        trainer = Trainer(process.socket, Model())
        assert trainer.open().resume_seq == bad.seq
        with pytest.raises(SaveRefused, match="invalid"):
            trainer.restore(bad.seq)
        opened = trainer.open(exclude_seqs=[bad.seq])
        assert (opened.resume_seq, opened.fell_back) == (good.seq, True)
        trainer.model.wipe()
        trainer.restore(good.seq)
        assert same(trainer.model.state(), state)
        trainer.save_and_commit()
        trainer.close()


def test_restore_of_what_is_not_there(trainer: Trainer) -> None:
    """not_found, and for a table that is not stored mismatch: neither makes the checkpoint invalid."""
    with pytest.raises(SaveRefused, match="not_found"):
        trainer.restore(77)
    commit = trainer.save_and_commit()
    trainer.model.tables[1].fqn = "renamed.weight"
    trainer.attach()
    with pytest.raises(SaveRefused, match="mismatch"):
        trainer.restore(commit.seq)


def test_warm_start_from_another_run(tmp_path: Path, url: str) -> None:
    """Read from one run, commit to another; the first cut there is a baseline."""
    with sidecar(tmp_path, url, encoding="fp32", run="source") as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        trainer.model.train()
        trainer.save_and_commit()
        state = trainer.model.state()
        trainer.close()
        process.kill()
    with sidecar(tmp_path, url, encoding="fp32", run="target") as process:
        trainer = Trainer(process.socket, Model())
        opened = trainer.open(from_run="source")
        assert opened.HasField("resume_seq")
        trainer.model.wipe()
        trainer.restore(opened.resume_seq, from_run="source")
        assert same(trainer.model.state(), state)
        trainer.base_seq = None
        assert trainer.save_and_commit().baseline
        trainer.close()


# The cache, housekeeping, the end.


def test_prefetch_brings_the_newest_checkpoint_before_anyone_asks(tmp_path: Path, url: str) -> None:
    """A pod on a new machine: an empty cache, filled while the trainer still imports its libraries."""
    with sidecar(tmp_path, url, encoding="fp32") as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        commit = trainer.save_and_commit()
        trainer.close()
        process.kill()
    shutil.rmtree(tmp_path / "cache")
    with sidecar(tmp_path, url, encoding="fp32", prefetch="yes") as process:
        eventually(lambda: any(event["event"] == "prefetch.done" for event in process.events()))
        trainer = Trainer(process.socket, Model())
        trainer.open()
        done = trainer.restore(commit.seq)
        assert done.store_bytes > 0, "they came from the store, if early"
        assert done.cache_bytes == 0
        trainer.close()


def test_a_run_does_not_grow_without_bound(tmp_path: Path, url: str) -> None:
    """Retention after commits, gc after its grace; what is kept restores."""
    flags = {"encoding": "fp32", "differential": "full", "housekeeping-s": 0, "gc-grace-s": 0, "keep-last": 2}
    with sidecar(tmp_path, url, **flags) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        for _ in range(8):
            trainer.model.train()
            commit = trainer.save_and_commit()
        state = trainer.model.state()

        def settled() -> bool:
            live = RunLog(open_store(url), "run").refresh().checkpoints
            cuts = {info.key.rpartition("/")[0] for info in open_store(url).list("run/data/")}
            return len(live) == 2 and len(cuts) <= 3

        eventually(settled, what="old checkpoints are gone")
        trainer.model.wipe()
        trainer.restore(commit.seq)
        assert same(trainer.model.state(), state)
        trainer.close()


def test_a_trainer_that_was_followed_keeps_house_no_more(tmp_path: Path, url: str) -> None:
    """A person's rewind beside a trainer that still holds the run: the way back is not retired by its sidecar.

    The first commit's round comes at once, that of the others after the pause: before the rewind, or (so but on a slow
    machine) after it.
    """
    flags = {
        "encoding": "fp32",
        "differential": "full",
        "housekeeping-s": 3,
        "gc-grace-s": 0,
        "keep-last": 3,
        "metrics-port": 0,
    }
    with sidecar(tmp_path, url, **flags) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        first = trainer.save_and_commit()
        for _ in range(2):
            trainer.model.train()
            newest = trainer.save_and_commit()
        log = RunLog(open_store(url), "run")
        assert rewind(log, f"seq:{first.seq}", ended=True) is not None
        counted = re.compile(r'^deltashard_housekeeping_total\{.*task="gc"\} (\S+)', re.MULTILINE)
        eventually(
            lambda: sum(map(float, counted.findall(process.metrics_page()))) > 1,
            what="the round of the last commits",
        )
        state = log.refresh()
        assert state.newest().seq == first.seq
        assert newest.seq in state.aside
        assert newest.seq in state.checkpoints
        trainer.close()


def test_caches_of_ended_runs_make_room(tmp_path: Path, url: str) -> None:
    """They go at start already, before any store answers; the cache of a run whose sidecar lives stays."""
    for name in ("ended", "alive"):
        PackCache(tmp_path / name, budget_bytes=1 << 20).close()
        (tmp_path / name / f"{'0' * 32}.pack").write_bytes(bytes(4096))
    with (
        PackCache(tmp_path / "alive", budget_bytes=1 << 20),
        sidecar(tmp_path, url, cache_total_bytes=1) as process,
    ):
        eventually(lambda: any(event["event"] == "sweep.done" for event in process.events()))
        assert not (tmp_path / "ended").exists()
        assert (tmp_path / "alive").exists()


def test_sigterm_finishes_what_is_staged(tmp_path: Path, url: str) -> None:
    """The trainer is gone, the save is not: it is committed before the process ends, and the marker is taken away."""
    process = SidecarProcess(tmp_path, url, encoding="fp32", term_deadline_s=60)
    trainer = Trainer(process.socket, Model(rows=100_000))
    trainer.open()
    number = trainer.save()
    assert process.terminate() == 0
    newest = RunLog(open_store(url), "run").refresh().newest()
    assert newest is not None
    assert newest.cut == number
    assert not list(open_store(url).list("run/closing/"))
    trainer.close()


# A store that is away.


@pytest.mark.minio
def test_store_down_training_goes_on(tmp_path: Path, own_minio: MinioServer) -> None:
    """Blocks keep moving, frames wait on disk, the save commits when the store is back."""
    url = own_minio.url(own_minio.new_bucket(), "prefix")
    with sidecar(tmp_path, url, encoding="fp32", metrics_port=0) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        trainer.save_and_commit()
        own_minio.stop()
        trainer.model.train()
        state = trainer.model.state()
        number = trainer.save()
        eventually(lambda: blocks(process, "free") == 8, what="every block is free although nothing uploads")
        with pytest.raises(SaveRefused, match="busy"):
            trainer.begin()
        own_minio.start()
        commit = trainer.committed(number)
        trainer.model.wipe()
        trainer.restore(commit.seq)
        assert same(trainer.model.state(), state)
        trainer.close()


def in_time(trainer: Trainer) -> pb.Commit | None:
    """The commit of a save; None where its deadline came first."""
    try:
        return trainer.save_and_commit()
    except SaveRefused as refused:
        if refused.cause not in {"unavailable", "deadline"}:
            raise
        return None


@pytest.mark.minio
def test_a_stalled_store_costs_one_save(tmp_path: Path, own_minio: MinioServer) -> None:
    """It fails by its deadline, the trainer hears of it, the next save covers; SIGTERM aborts by its own deadline."""
    with FaultyProxy(own_minio.port) as proxy:
        url = own_minio.url(own_minio.new_bucket(), port=proxy.port)
        with sidecar(tmp_path, url, encoding="fp32", save_deadline_s=10, term_deadline_s=1) as process:
            trainer = Trainer(process.socket, Model())
            trainer.open()
            eventually(lambda: in_time(trainer), what="a save within its deadline")
            proxy.hang = True
            trainer.model.train()
            assert in_time(trainer) is None
            proxy.hang = False
            proxy.release()
            trainer.model.train()
            state = trainer.model.state()
            commit = eventually(lambda: in_time(trainer), what="a save within its deadline")
            trainer.model.wipe()
            trainer.restore(commit.seq)
            assert same(trainer.model.state(), state)
            proxy.hang = True
            trainer.save()
            assert process.terminate() == 0
            trainer.close()
            proxy.hang = False
            proxy.release()


@pytest.mark.minio
def test_a_restore_without_the_store_is_unavailable(tmp_path: Path, own_minio: MinioServer) -> None:
    """Never invalid: nothing was proven."""
    url = own_minio.url(own_minio.new_bucket())
    with sidecar(tmp_path, url, encoding="fp32", restore_deadline_s=10, cache_bytes="64MiB") as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        commit = trainer.save_and_commit()
        for path in (tmp_path / "cache").glob("*.pack"):
            path.unlink()
        own_minio.stop()
        with pytest.raises(SaveRefused, match="unavailable"):
            trainer.restore(commit.seq)
        own_minio.start()
        trainer.restore(commit.seq)
        trainer.close()
