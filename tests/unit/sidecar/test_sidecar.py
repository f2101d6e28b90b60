"""A sidecar in this process without its transport: what remains of ended sessions."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.format.index import box_message, table_message
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import save_service, settings
from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.run.run import Run
from deltashard_sidecar.save.save import Save
from deltashard_sidecar.sidecar import Sidecar
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import configure

TABLE = TableSchema(fqn="t", rows=100, columns=8, dtype="float32")


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    config = settings.load(
        ["--url", (tmp_path / "store").as_uri(), "--run", "r", "--dir", str(tmp_path / "dir"),
         "--cache-dir", str(tmp_path / "cache"), "--arena-bytes", "64MiB"],
        {},
    )  # fmt: skip
    config.dir.mkdir()
    keeper = ArenaKeeper(config.arena_path, blocks=config.blocks, block_bytes=config.block_bytes)
    run = Run(config, metrics=Metrics(), log=configure("error", run="r"))
    made = Sidecar(keeper, run)
    yield made
    made.saves.pool.shutdown()
    run.close()
    keeper.close()


def attachment() -> pb.AttachRequest:
    box = Box(table="t", row_start=0, row_stop=100, col_start=0, col_stop=8)
    return pb.AttachRequest(
        protocol_min=1, protocol_max=1, world_size=1, pid=os.getpid(), attempt=1,
        tables=[table_message(TABLE)], boxes=[box_message(box)],
    )  # fmt: skip


def test_directive_during_attachment_sets_the_timer(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_of = sidecar.keeper.step_of
    directive = fleet.Directive(id=1, policy=pb.Policy(every_s=7.0))
    threads: list[threading.Thread] = []

    def directed(rank: int) -> int:
        if not threads:
            threads.append(threading.Thread(target=sidecar.control.apply_directive, args=(directive,)))
            threads[0].start()
            threads[0].join(0.5)  # it has finished, or waits for the attachment
        return step_of(rank)

    monkeypatch.setattr(sidecar.keeper, "step_of", directed)
    session = sidecar.sessions.get(sidecar.attach(attachment()).session)
    threads[0].join(60.0)
    assert not threads[0].is_alive()
    assert session.schedule.every_s == 7.0
    sidecar.detach(pb.DetachRequest(session=session.id))


def test_new_save_waits_until_the_last_outcome_is_notified(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait, the trainer's next save would be refused as busy."""
    session = sidecar.attach(attachment()).session
    sidecar.open(pb.OpenRequest(session=session, which="none"))
    first = sidecar.begin(pb.SaveRequest.Begin(session=session, snapshot_id=1, step=1))
    first.start()
    monkeypatch.setattr(save_service, "BRIEF_WAIT_S", 60.0)
    requested, wait = threading.Event(), first.finished.wait

    def waited(timeout: float | None = None) -> bool:
        requested.set()
        return wait(timeout)

    def fail_notification(*_: Any) -> None:
        assert requested.wait(60.0)
        raise RuntimeError("any error of the notification must not block the next save")

    monkeypatch.setattr(first.finished, "wait", waited)
    monkeypatch.setattr(sidecar.activity, "ended", fail_notification)
    stream = threading.Thread(target=first.read, args=(iter(()),))
    stream.start()
    while not first.has_ended:
        assert stream.is_alive()
    second = sidecar.begin(pb.SaveRequest.Begin(session=session, snapshot_id=2, step=2))
    stream.join(60.0)
    assert first.finished.is_set()
    second.cancel(Cause.STOPPING, "the test ends")


def staging(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> tuple[Save, list[int], list[Any]]:
    """Return a save in progress, the blocks granted to it, and the list of work submitted to the encode pool."""
    session = sidecar.attach(attachment()).session
    sidecar.open(pb.OpenRequest(session=session, which="none"))
    given: list[Any] = []
    monkeypatch.setattr(sidecar.saves.pool, "submit", given.append)
    save = sidecar.begin(pb.SaveRequest.Begin(session=session, snapshot_id=1, step=1))
    save.start()
    _begun, granted = itertools.islice(save.replies(), 2)
    return save, list(granted.blocks.granted), given


def rows(block: int) -> pb.SaveRequest:
    return pb.SaveRequest(rows=pb.RowBatch(block=block, rows=10, contiguous=True, col_stop=8))


@pytest.mark.parametrize("batches", [1, 5, 6])
def test_encoding_waits_while_the_trainer_has_free_blocks(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """Five of six blocks may wait for the end of the save. The sixth leaves no block to copy into."""
    save, blocks, given = staging(sidecar, monkeypatch)
    assert len(blocks) == 6
    seen: list[int] = []

    def messages() -> Iterator[pb.SaveRequest]:
        for block in blocks[:batches]:
            yield rows(block)
            seen.append(len(given))
        yield pb.SaveRequest(seal=pb.SaveRequest.Seal())

    save.read(messages())
    assert seen == [0, 0, 0, 0, 0, 6][:batches]
    assert len(given) == batches
    for encode in given:
        encode()
    assert save.finished.wait(60.0)
    assert sidecar.keeper.counts()["free"] == sidecar.keeper.ledger.total
