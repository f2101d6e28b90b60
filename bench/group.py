"""Compares four ranks with torch.distributed.checkpoint on MinIO: stall, durable, bytes, restore by two ranks.

The model is TorchRec's: four tables sharded by rows over all ranks, fused row-wise Adagrad, a small dense part. Ranks
are processes of one gloo group, forked from a process that has imported everything; one sidecar serves them, as in
one pod. Both sides save the same live state in turns; 26 % of the rows change between checkpoints. DCP gets
TorchRec's own sharded state dicts and writes with its FsspecWriter over s3fs.

    stall     time of the training thread from the trigger until it is free: all of `async_save`; for ours all
              `save()` and `step()` calls up to the snapshot's (a group takes the snapshot some steps later and trains
              until then). All ranks start at a barrier. A save's stall is that of its slowest rank.
    durable   from the trigger until the slowest rank has the future's result or the log entry.
    bytes     growth of the bucket.
    restore   two new ranks, each with twice the rows: `restore()` of a baseline and a delta of 26 %, on a sidecar
              with an empty cache, against `dcp.load` into the state dict in place, including its reader's creation.
    step      blocks of ordinary steps with and without a Checkpointer in turns, their ratio of medians by pair; the
              share of a step inside our own functions; and the number of collectives of the group.

Sums over the bits of all shards compare the restored state with the saved one: both sides must restore the state of
the trigger, although training continued. In 8 bits this covers the optimizer's state only, as weights are rounded.

    bench/run.py group --out out/group.json           2 GiB (`make bench-group`)
    bench/run.py group --quick                        64 MiB, one round
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from group_ranks import CACHED, DIRTY, ENCODINGS, FULL, LOAD, PLAIN, SCRIPT, SMALL, GroupScale
from measuring import Row, compare_with, limit, log_progress
from ours import SidecarServer
from peers import THREADS, StoreLocation, minio_place


def _run_ranks(
    folder: Path,
    does: str,
    world: int,
    scale: GroupScale,
    place: StoreLocation,
    sockets: dict[str, list[str]],
    **options: Any,
) -> list[Any]:
    folder.mkdir()
    asked = {
        "does": does, "world": world, "folder": str(folder), "scale": asdict(scale), "place": asdict(place),
        "sockets": sockets, "options": options,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(asked)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        check=False,
        stdout=sys.stderr,
    )
    if done.returncode:
        logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("log-*")))
        raise RuntimeError(f"ranks that {does} failed:\n{logs}")
    return [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(world)]


def run(*, quick: bool = False) -> dict[str, Any]:
    scale = SMALL if quick else FULL
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltashard-bench-")))
        place, _ = stack.enter_context(minio_place("group"))

        def sidecar(into: contextlib.ExitStack, run: str, name: str, **flags: object) -> str:
            started = into.enter_context(SidecarServer(place, run, folder / name, **flags))
            os.environ.pop("DELTASHARD_SOCKET")  # otherwise the next sidecar would use this one
            started.wait_idle()
            return str(started.memory / "sidecar.sock")

        # As much shared memory as the peer uses for its copy, and at least what four ranks need.
        arena_bytes = max(256 << 20, int(scale.state_bytes * 1.1))
        with contextlib.ExitStack() as writers:
            sockets = {
                name: [sidecar(writers, name, name, arena_bytes=arena_bytes, encoding=name)]
                for name in ENCODINGS
            }
            sockets["step"] = [
                sidecar(writers, f"step-{pair}", f"step-{pair}", arena_bytes=256 << 20)
                for pair in range(scale.pairs)
            ]
            log_progress(f"{scale.world} ranks save, and train")
            saved = _run_ranks(folder / "saving", "save", scale.world, scale, place, sockets)
        sockets = {
            name: [
                sidecar(stack, name, f"{name}-{turn}", arena_bytes=128 << 20, encoding=name)
                for turn in range(scale.rounds)
            ]
            for name in ENCODINGS
        }
        log_progress(f"{scale.readers} ranks restore")
        first = saved[0]
        restored = _run_ranks(
            folder / "restoring", "restore", scale.readers, scale, place, sockets,
            tag=first["tag"], sums=first["sums"],
        )  # fmt: skip
    out: dict[str, Any] = {
        "scale": {**asdict(scale), "rows": scale.rows, "dirty": DIRTY, "dcp_threads": THREADS},
        "saves": _saves(saved),
        "restores": _restores(restored),
        "step": _step_cost(saved),
        "every_rank": {"saving": saved, "restoring": restored},
    }
    out["rows"] = _rows(out)
    return out


def _saves(saved: list[Any]) -> dict[str, Any]:
    """Return for each kind of save the slowest rank's medians over the counted rounds, and each rank's median."""
    found = {}
    for kind in saved[0]["rounds"][0]:
        rounds = [[rank["rounds"][n][kind] for rank in saved] for n in range(1, len(saved[0]["rounds"]))]
        found[kind] = {
            **{f: median(max(r[f] for r in ranks) for ranks in rounds) for f in ("stall_s", "durable_s")},
            "stall_s_by_rank": [median(ranks[n]["stall_s"] for ranks in rounds) for n in range(len(saved))],
            "stall_s_by_round": [max(r["stall_s"] for r in ranks) for ranks in rounds],
            "durable_s_by_round": [max(r["durable_s"] for r in ranks) for ranks in rounds],
            "stall_cpu_s": median(max(r["stall_cpu_s"] for r in ranks) for ranks in rounds),
            "stored_bytes": median(ranks[0]["stored_bytes"] for ranks in rounds),
        }
        if "steps_to_snapshot" in rounds[0][0]:
            found[kind] |= {
                "snapshot_s": median(max(r["snapshot_s"] for r in ranks) for ranks in rounds),
                "steps_to_snapshot": median(ranks[0]["steps_to_snapshot"] for ranks in rounds),
                "baseline": [ranks[0]["baseline"] for ranks in rounds],
            }
    return found


def _restores(restored: list[Any]) -> dict[str, Any]:
    found = {}
    for name, times in restored[0]["restore_s"].items():
        slowest = [max(rank["restore_s"][name][n] for rank in restored) for n in range(len(times))]
        found[name] = {"restore_s": median(slowest), "by_round": slowest}
    return found


def _step_cost(saved: list[Any]) -> dict[str, Any]:
    """Wall time is rank 0's, as the step's collectives synchronize the ranks; processor time is of all ranks."""
    pairs = range(len(saved[0]["step"]["pairs"]))

    def total(pair: int, which: str) -> float:
        return sum(rank["step"]["pairs"][pair][which][1] for rank in saved)

    walls = [saved[0]["step"]["pairs"][n] for n in pairs]
    return {
        "step_s": median(pair["without"][0] for pair in walls),
        "wall_share": median(pair["with"][0] / pair["without"][0] - 1 for pair in walls),
        "wall_share_by_pair": [pair["with"][0] / pair["without"][0] - 1 for pair in walls],
        "cpu_share": median(total(n, "with") / total(n, "without") - 1 for n in pairs),
        "cpu_share_by_pair": [total(n, "with") / total(n, "without") - 1 for n in pairs],
        "inside_share": median(max(rank["step"]["pairs"][n]["with"][2] for rank in saved) for n in pairs),
        "collectives": saved[0]["step"]["collectives"],
    }


def _rows(out: dict[str, Any]) -> list[Row]:
    saves, restores, step = out["saves"], out["restores"], out["step"]
    rows = []
    for encoding in ENCODINGS:
        barred = encoding == "q8"  # the default; the other value is only recorded
        some, everything = saves[f"{encoding} some"], saves[f"{encoding} all"]
        for peer in (PLAIN, CACHED):
            theirs, bars = saves[peer], barred and peer == PLAIN
            for what, ours, stall_bar, durable_bar in (
                ("26 % dirty", some, 2.5, 3.0),
                ("all rows", everything, None, None),
            ):
                pairs = (("stall", "stall_s", stall_bar), ("trigger to durable", "durable_s", durable_bar))
                for title, key, bar in pairs:
                    named = f"{title}, {what}, {encoding}"
                    rows.append(compare_with(named, ours[key], peer, theirs[key], "s", bar if bars else None))
        full = saves[PLAIN]["stored_bytes"]
        bar = 6.0 if barred else None
        rows.append(
            compare_with(f"bytes, 26 % dirty, {encoding}", some["stored_bytes"], PLAIN, full, "B", bar)
        )
        rows.append(
            compare_with(f"bytes, all rows, {encoding}", everything["stored_bytes"], PLAIN, full, "B")
        )
        title, bar = f"restore by {out['scale']['readers']} ranks, {encoding}", 2.0 if barred else None
        mine, theirs_s = restores[encoding]["restore_s"], restores[LOAD]["restore_s"]
        rows.append(compare_with(title, mine, LOAD, theirs_s, "s", bar))
    more = step["collectives"]["with"] - step["collectives"]["without"]
    rows += [
        limit("ordinary step, without us", step["step_s"], "s"),
        limit("... more collectives with us", more, "", 0),
        limit("... inside of our functions", 100 * step["inside_share"], "%", 1.0),
        limit("... longer with us, paired", 100 * step["wall_share"], "%"),
        limit("... more processor time with us, paired", 100 * step["cpu_share"], "%"),
    ]
    return rows
