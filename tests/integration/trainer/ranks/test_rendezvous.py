"""Ranks rendezvous over their group's store despite keys of an older group. Missing ranks are named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from deltashard.errors import RanksDiffer
from deltashard.group import rendezvous
from deltashard.group.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Initialise a group. Ranks are threads here, so each declares that this is its first rendezvous."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    monkeypatch.setattr(rendezvous, "_numbers", itertools.repeat(1))
    yield
    dist.destroy_process_group()


def join_all(world: int) -> list[Rendezvous]:
    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(lambda rank: Rendezvous(rank, world, b"I am %d" % rank), range(world)))


def test_stale_keys_are_not_ranks() -> None:
    """Stale hellos, welcomes and messages of an older group have no effect."""
    old = join_all(2)
    old[0].broadcast("open/1", b"old")
    new = join_all(2)
    assert new[0].name != old[0].name
    assert new[0].name == new[1].name
    new[0].broadcast("open/1", b"new")
    assert new[1].await_broadcast("open/1", 5) == b"new"


def test_any_rank_sends_its_data_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rank may read the data. They are deleted when all have read them. An unavailable sender is reported."""
    monkeypatch.setattr(rendezvous, "_CHUNK_BYTES", 1000)
    ranks = join_all(3)
    data = bytes(range(256)) * 10
    ranks[1].send("part", data)
    assert [each.receive("part", 5) for each in (ranks[0], ranks[2])] == [data] * 2
    ranks[1].delete_sent("part", len(data))
    ranks[1].send("nothing", b"")
    ranks[1].send("gone", None)
    assert [ranks[0].receive(what, 5) for what in ("nothing", "gone")] == [b"", None]
    with pytest.raises(RanksDiffer, match="sent nothing for"):
        ranks[0].receive("never", 0.1)


def test_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 0.2)
    with pytest.raises(RanksDiffer, match="no message of ranks 1, 2 for"):
        Rendezvous(0, 3, b"")
    with pytest.raises(RanksDiffer, match="rank 1 waited for the other ranks"):
        Rendezvous(1, 3, b"")
    zero, one = short_timeouts(monkeypatch)
    zero.submit("x", b"")
    with pytest.raises(RanksDiffer, match="no message of ranks 1 for"):
        zero.gather("x", 0.1)
    with pytest.raises(RanksDiffer, match="rank 0 sent nothing"):
        one.await_broadcast("y", 0.1)


def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> list[Rendezvous]:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 60.0)
    return join_all(2)
