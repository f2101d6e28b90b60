"""A layout of millions of boxes passes from library to sidecar; where it cannot, the user is told why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from deltashard.attach import session
from deltashard.attach.session import Link
from deltashard.errors import UserError
from deltashard_checkpoint.format.layout import Layout, TableShape
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1 import trainer_pb2_grpc

from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import Trainer
from tests.support.sidecar_process import sidecar

LARGE_BYTES = 64 << 20


def _layout(ranks: int, tables: int) -> Layout:
    """Every table cut by rows over all ranks, a row each."""
    rank = np.repeat(np.arange(ranks), tables)
    return Layout(
        world_size=ranks,
        tables=[TableShape(fqn=f"table_{n:04d}", rows=ranks, columns=4) for n in range(tables)],
        columns={
            "rank": rank,
            "table": np.tile(np.arange(tables), ranks),
            "row_start": rank,
            "row_stop": rank + 1,
            "col_start": np.zeros(len(rank), np.int64),
            "col_stop": np.full(len(rank), 4, np.int64),
        },
    )


@contextmanager
def _link(address: str) -> Iterator[Link]:
    """The library's own channel and calls."""
    with grpc.insecure_channel(address, options=session._OPTIONS) as channel:
        yield Link(
            path=Path(),
            channel=channel,
            stub=trainer_pb2_grpc.TrainerStub(channel),
            reply=pb.AttachReply(),
            arena=None,  # type: ignore[arg-type]  # no tensor goes anywhere
            line=memoryview(b""),
            tables=(),
            attempt=None,
        )


def test_layout_over_64_mib_opens_attempt(tmp_path: Path) -> None:
    """2.1 million boxes, over a real sidecar: it is stored as it was sent."""
    layout = _layout(2100, 1000)
    assert len(layout.data) > LARGE_BYTES
    url = (tmp_path / "store").as_uri()
    with sidecar(tmp_path, url, arena_bytes="64MiB") as process:
        trainer = Trainer(process.socket, FakeModel(of_rank=0), rank=0, world_size=2100)
        with _link(f"unix:{process.socket}") as link:
            request = pb.OpenRequest(session=trainer.reply.session, which="latest", layout=layout.data)
            reply = link.open(request)
        assert reply.layout == layout.digest
        trainer.close()
    with open_store(url) as store:
        assert store.get(f"run/{layout.key}") == layout.data


def test_oversized_layout_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_LAYOUT_BYTES", 99)
    with _link("unix:/nowhere") as link, pytest.raises(UserError, match="100 bytes, more than 99"):
        link.open(pb.OpenRequest(layout=bytes(100)))
