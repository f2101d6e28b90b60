"""Simulates many ranks, metadata only: 4,096 ranks in 512 pods, 800 tables of 10^8 rows.

Layout, reports, manifests, entries, indexes and plans are those of the real code. Only packs are not written, and
an index describes generated ones: rows of 8 bits with one row-wise field, a baseline and deltas of 26 % of the rows.
Every table is sharded by rows over all ranks, which gives the maximum number of boxes.

    commits   every pod's `commit_parts` over one store in memory that counts requests. Pods are greenlets over a
              simulated clock, so that waiting is free and the order of requests is the same in every run. Uploads end
              within 30 s of one another, rank 0's first; in the last snapshot it is the last, which shows a commit
              without waiting. At the first baseline and delta, pods have no estimate of the duration yet.
    opening   a trainer's library sends the layout to a real sidecar, which opens the attempt on a directory.
    reading   new processes plan a restore from a copy of that store on disk: one rank, the ranks of one pod, a rank
              of another world size. Seconds are from an empty log to the plan; memory is the peak above what imports
              take.
    a month   the requests of such a snapshot every 30 minutes, with its packs, at S3's list price.

    bench/run.py ranks --out out/ranks.json           4,096 ranks (`make bench-ranks`): some minutes, 6 GB of memory
    bench/run.py ranks --quick                        64 ranks, 20 tables of 10^6 rows
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.manifest import Manifests, manifest_key
from deltashard_checkpoint.restore.checkpoint_reader import plan_restore
from deltashard_checkpoint.restore.plan import Want
from deltashard_checkpoint.restore.shared_read import SharedReads
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.write.snapshot_reports import LIST_PAGE
from measuring import Row, limit, memory_bytes
from rank_world import DENSE_OWNERS, FULL, RUN, SMALL, CommittedSnapshot, PodGroup, RankScale, owners

EVERY_S = 1800.0
MONTH_S = 30 * 86400.0
USD_WRITE, USD_READ = 5e-6, 0.4e-6
"""Price of one PUT or LIST, and of one GET: S3 Standard's list price, us-east-1."""
MB = 1e6


# Opening


def open_through_sidecar(layout: Layout) -> dict[str, float]:
    """Send the layout of all ranks from rank 0's library over its sidecar's socket, and open an attempt."""
    import grpc
    from deltashard.attach.lock import lock_line, open_arena, release_arena
    from deltashard.attach.session import OPEN_DEADLINE_S
    from deltashard_proto.arena_layout import ArenaShape
    from deltashard_proto.message_limit import MESSAGE_OPTIONS
    from deltashard_proto.v1 import trainer_pb2 as pb
    from deltashard_proto.v1.trainer_pb2_grpc import TrainerStub
    from ours import SidecarServer
    from peers import StoreLocation

    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        place = StoreLocation(name="disk", root=f"{folder}/store")
        with (
            SidecarServer(place, RUN, Path(folder), arena_bytes="64MiB") as sidecar,
            grpc.insecure_channel(f"unix:{sidecar.memory}/sidecar.sock", options=MESSAGE_OPTIONS) as channel,
        ):
            stub = TrainerStub(channel)  # type: ignore[no-untyped-call]  # generated
            attached = stub.Attach(
                pb.AttachRequest(
                    protocol_min=1, protocol_max=1, world_size=layout.world_size, pid=os.getpid()
                )
            )
            shape = ArenaShape.within(attached.arena_bytes, block_bytes=attached.block_bytes)
            arena = open_arena(Path(attached.arena_path), shape)
            try:
                lock_line(arena, 0)
                before, begun_s = sidecar.anonymous_bytes(), time.monotonic()
                request = pb.OpenRequest(session=attached.session, which="latest", layout=layout.data)
                reply = stub.Open(request, timeout=OPEN_DEADLINE_S)
                seconds = time.monotonic() - begun_s
            finally:
                release_arena(arena)
            assert reply.layout == layout.digest
        return {"seconds": seconds, "peak_bytes": sidecar.peak_anonymous_bytes - before}


# Reading


def copy_for_readers(store: Store, to: Path) -> dict[str, int]:
    """Copy to disk what readers need, and return bytes by kind."""
    sizes: Counter[str] = Counter()
    with FileStore(to) as disk:
        for info in store.list(RUN):
            if "/part/" in info.key or (info.key.endswith(".index") and not info.size_bytes):
                continue
            disk.put(info.key, store.get(info.key))
            sizes[info.key.rsplit(".", 1)[-1] if "/layout/" not in info.key else "layout"] += info.size_bytes
    return dict(sizes)


class _GetCountingStore(FileStore):
    """A store on disk that counts reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gets: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        kind = (
            "layout"
            if "/layout/" in key
            else "log"
            if "/log/" in key
            else key.rsplit(".", 1)[-1]
            if "/data/" in key
            else "other"
        )
        self.gets[kind] += 1
        self.bytes[kind] += len(data)
        return data


def plan_in_this_process(scale: RankScale, root: Path, ranks: list[int], world: int) -> dict[str, Any]:
    """Plan the newest checkpoint for ranks of a world, one after the other, as the sidecar of their pod does."""
    schemas = scale.schemas
    wants = {
        rank: [
            Want(schema=schema, boxes=(box,))
            for schema, box in zip(schemas, scale.boxes_of(rank, world), strict=True)
        ]
        for rank in ranks
    }
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory_bytes("self", "VmRSS")
    found: dict[str, Any] = {"seconds": []}
    with _GetCountingStore(root) as store:
        begun_s = time.monotonic()
        log = RunLog(store, RUN)
        state = log.refresh()
        manifests, shared = Manifests(store, RUN), SharedReads()
        newest = state.newest()
        assert newest is not None
        for rank in ranks:
            plan = plan_restore(
                store, state, newest.seq, wants[rank], rank=rank, world_size=world, manifests=manifests, shared=shared
            )  # fmt: skip
            found["seconds"].append(time.monotonic() - begun_s)
            begun_s = time.monotonic()
            found.setdefault("frames", plan.frames)
            found.setdefault("requests", len(plan.requests))
            found.setdefault("chain", plan.chain)
            found.setdefault("blobs", len(plan.blobs))
            found.setdefault("gets_of_first", dict(store.gets))
            found.setdefault("bytes_of_first", dict(store.bytes))
        found["gets"], found["bytes"] = dict(store.gets), dict(store.bytes)
    found["peak_bytes"] = memory_bytes("self", "VmHWM") - before
    return found


def plan_in_another_process(scale: RankScale, root: Path, ranks: list[int], world: int) -> dict[str, Any]:
    asked = json.dumps({"scale": asdict(scale), "root": str(root), "ranks": ranks, "world": world})
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--plan", asked],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# Everything


def run(*, quick: bool = False, scale: RankScale | None = None) -> dict[str, Any]:
    scale = scale or (SMALL if quick else FULL)
    middle = scale.ranks // 2 // scale.per_pod * scale.per_pod
    pod = list(range(middle, middle + scale.per_pod))
    other = scale.other_ranks // 3
    probe = scale.layout()
    met = probe.ranks_overlapping(scale.boxes_of(other, scale.other_ranks))
    boxes = len(probe)
    del probe
    group = PodGroup(scale, {*pod, *met, *owners(scale)})
    snapshots: list[CommittedSnapshot] = []
    for number in range(1, scale.snapshots + 1):
        covers = snapshots[-1].seq if snapshots else None
        snapshots.append(group.save(number, covers, first_last=number == scale.snapshots))
    sizes = _sizes(group, snapshots)
    opening = open_through_sidecar(group.layout)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        copied = copy_for_readers(group.world.store, Path(folder))
        opened_s, made_s = group.opened_s, group.made_layout_s
        del group  # exclude the pods' memory from the readers'
        reading = {
            "one rank": plan_in_another_process(scale, Path(folder), pod[:1], scale.ranks),
            "a pod": plan_in_another_process(scale, Path(folder), pod, scale.ranks),
            "another world": plan_in_another_process(scale, Path(folder), [other], scale.other_ranks),
        }
    month = _month(snapshots)
    found: dict[str, Any] = {
        "scale": {**asdict(scale), "pods": scale.pods, "boxes": boxes},
        "bytes": sizes,
        "copied_bytes": copied,
        "layout_made_s": made_s,
        "attempt_opened_s": opened_s,
        "opening": opening,
        "snapshots": [asdict(each) for each in snapshots],
        "reading": reading,
        "ranks_met_by_another_world": len(met),
        "month": month,
    }
    found["rows"] = _rows(scale, found, snapshots)
    return found


def _sizes(group: PodGroup, snapshots: list[CommittedSnapshot]) -> dict[str, int]:
    store, newest = group.world.store, snapshots[-1]
    entry = group.logs[0].state.checkpoints[newest.seq]
    assert entry.listed is not None
    reports = [i.size_bytes for i in store.list(f"{RUN}/data/{group.attempt:020d}/{newest.number:08d}/part/")]
    manifest = manifest_key(group.attempt, newest.number, entry.listed.manifest)
    return {
        "layout": len(group.layout.data),
        "entry": len(store.get(f"{RUN}/{entry_key(newest.seq)}")),
        "manifest": len(store.get(f"{RUN}/{manifest}")),
        "report": max(reports),
        "reports": sum(reports),
        "index_baseline": group.index_bytes[snapshots[0].number],
        "index_delta": group.index_bytes[newest.number],
    }


def _total(snapshot: CommittedSnapshot, kind: str) -> int:
    return sum(snapshot.requests[who].get(kind, 0) for who in ("first", "others"))


def _month(snapshots: list[CommittedSnapshot]) -> dict[str, float]:
    """Return requests and dollars of a delta every half hour and a baseline a day for a month."""
    times = round(MONTH_S / EVERY_S)
    baselines = round(MONTH_S / 86400.0)
    deltas = times - baselines
    full, delta = snapshots[0], snapshots[2]
    packs = baselines * full.packs + deltas * delta.packs
    writes = times * (_total(delta, "PUT") + _total(delta, "LIST"))
    reads = times * (_total(delta, "GET") + _total(delta, "HEAD"))
    return {
        "snapshots": times,
        "pack_puts": packs,
        "other_writes": writes,
        "reads": reads,
        "usd_packs": packs * USD_WRITE,
        "usd_others": writes * USD_WRITE + reads * USD_READ,
    }


def _rows(scale: RankScale, found: dict[str, Any], snapshots: list[CommittedSnapshot]) -> list[Row]:
    delta, last, sizes, reading = snapshots[1], snapshots[-1], found["bytes"], found["reading"]
    one, pod, other = reading["one rank"], reading["a pod"], reading["another world"]
    links = len(one["chain"])
    month = found["month"]
    meet = found["ranks_met_by_another_world"]
    return [
        limit(f"layout, {found['scale']['boxes']:,} boxes", sizes["layout"], "B"),
        limit("the same, from trainer to an attempt of its sidecar", found["opening"]["seconds"], "s"),
        limit("memory of that in the sidecar", found["opening"]["peak_bytes"], "B"),
        limit("entry of a checkpoint", sizes["entry"], "B"),
        limit("manifest", sizes["manifest"], "B"),
        limit("reports of a snapshot, all", sizes["reports"], "B"),
        limit("index of one rank, baseline", sizes["index_baseline"], "B"),
        limit("index of one rank, delta", sizes["index_delta"], "B"),
        limit(
            "PUTs of a snapshot beside packs",
            _total(delta, "PUT"),
            "PUTs",
            2 * scale.ranks + 2 * scale.pods,
        ),
        limit(
            "LIST pages of rank 0's pod, all others there",
            last.requests["first"]["LIST"],
            "LISTs",
            -(-scale.ranks // LIST_PAGE) + 1,
        ),
        limit("the same, uploads within 30 s", snapshots[2].requests["first"]["LIST"], "LISTs", 5.0 + 1),
        limit("the same, the first delta of its process", delta.requests["first"]["LIST"], "LISTs"),
        limit("LIST pages of all other pods", snapshots[2].requests["others"]["LIST"], "LISTs"),
        limit("GETs of rank 0's pod", last.requests["first"].get("GET", 0), "GETs", 0.0),
        limit(
            "GETs of all other pods (the entry, each)", snapshots[2].requests["others"].get("GET", 0), "GETs"
        ),
        limit("commit, work of rank 0's pod", last.first_s, "s"),
        limit("commit, last part to last pod that knows", snapshots[2].waited_s, "s"),
        limit("plan of one rank, from an empty log", one["seconds"][0], "s", 5.0),
        limit("plan of the next rank of its pod", max(pod["seconds"][1:]), "s", 5.0),
        limit("memory of that, one rank alone", one["peak_bytes"], "B", 200 * MB),
        limit("memory of that, a rank of a pod", pod["peak_bytes"] / len(pod["seconds"]), "B", 200 * MB),
        limit("indexes that a rank reads", one["gets"]["index"], "GETs", links + DENSE_OWNERS + 1),
        limit(
            "the same, all ranks of a pod",
            pod["gets"]["index"],
            "GETs",
            links * len(pod["seconds"]) + DENSE_OWNERS + 1,
        ),
        limit(f"plan of a rank of {scale.other_ranks:,}", other["seconds"][0], "s", 5.0),
        limit("memory of that", other["peak_bytes"], "B", 200 * MB),
        limit("indexes that it reads", other["gets"]["index"], "GETs", links * meet + DENSE_OWNERS + 1),
        limit("a month's requests beside packs", month["other_writes"] + month["reads"], "requests"),
        limit("what they cost", month["usd_others"], "USD"),
        limit("what the PUTs of its packs cost", month["usd_packs"], "USD"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="see bench/run.py ranks")
    parser.add_argument("--plan", required=True, type=json.loads)
    asked = parser.parse_args().plan
    scale = RankScale(**asked["scale"])
    print(json.dumps(plan_in_this_process(scale, Path(asked["root"]), asked["ranks"], asked["world"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
