"""Compares checkpointers on a directory and on a real MinIO: stall, trigger to durable, bytes, restore.

All checkpointers save the same live state in the same process, in turns, so that a slow moment affects all of them.
Times are medians over the rounds. For a peer that cannot run on this torch, the result has its error. Ratios are
peer / ours: larger is better. The bars are from the design (docs/design) and are only reported, never asserted.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import states
import torch
from measuring import Row, at_least, compare_with, limit, log_progress, record_errors
from ours import Deltashard, OurSave, SidecarServer
from peers import PEERS, SaveTiming, StoreLocation, minio_place

DIRTY = 0.26
GB = 1e9


def run(*, quick: bool) -> dict[str, object]:
    megabytes, rounds = (40, 1) if quick else (400, 3)
    out: dict[str, object] = {"state_bytes": 0, "places": {}, "errors": {}}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltashard-bench-")))
        minio, _ = stack.enter_context(minio_place("bench"))
        places = (StoreLocation(name="file", root=str(folder / "store")), minio)
        state = states.build(megabytes=megabytes)
        out["state_bytes"], out["rows_of_tables"] = state.bytes, state.rows
        for place in places:
            log_progress(f"peers on {place.name}")
            peers = _measure_peers(place, state, rounds, out)
            log_progress(f"deltashard on {place.name}")
            ours = _measure_ours(place, state, rounds, folder)
            out["places"][place.name] = {"peers": peers, "ours": ours}  # type: ignore[index]
        log_progress("step(), and a run of many intervals")
        out["step_ns"] = _measure_step(places[0], state, folder, calls=20_000 if quick else 200_000)
        out["sequence"] = _measure_sequences(
            places[0], folder, megabytes=20 if quick else 80, intervals=6 if quick else 20
        )
    out["rows"] = _rows(out)
    return out


# Peers


def _measure_peers(
    place: StoreLocation, state: states.TrainingState, rounds: int, out: dict[str, object]
) -> dict[str, object]:
    Path(place.root).mkdir(exist_ok=True) if not place.remote else None
    alive = {}
    errors: dict[str, str] = out["errors"]  # type: ignore[assignment]
    for kind in PEERS:
        with record_errors(errors, f"{kind.name} on {place.name}"):
            alive[kind.name] = kind(place)
    saves: dict[str, list[SaveTiming]] = {name: [] for name in alive}
    loads: dict[str, list[float]] = {name: [] for name in alive}
    for turn in range(rounds + 1):  # the first round is warm-up
        for name, peer in list(alive.items()):
            state.touch(1.0, seed=turn)
            tag = f"{type(peer).__name__}-{turn}"
            try:
                saved, load_s = peer.save(state, tag), peer.load(state, tag)
            except Exception as error:
                errors[f"{name} on {place.name}"] = f"{type(error).__name__}: {error}"[:500]
                traceback.print_exc(limit=2)
                del alive[name]
                continue
            finally:
                place.remove(tag)
            if turn or rounds == 1:
                saves[name].append(saved)
                loads[name].append(load_s)
    for peer in alive.values():
        peer.close()
    return {
        name: _times(saves[name], loads[name]) | {"asynchronous": peer.asynchronous}
        for name, peer in alive.items()
    }


def _times(saves: list[SaveTiming], loads: list[float]) -> dict[str, object]:
    return {
        **{
            f"{of}_s": median(getattr(s, f"{of}_s") for s in saves)
            for of in ("stall", "stall_cpu", "durable")
        },
        **{f"best_{of}_s": min(getattr(s, f"{of}_s") for s in saves) for of in ("stall", "durable")},
        "restore_s": median(loads),
        "best_restore_s": min(loads),
        "stored_bytes": saves[-1].stored_bytes,
    }


# Ours


def _measure_ours(
    place: StoreLocation, state: states.TrainingState, rounds: int, folder: Path
) -> dict[str, object]:
    found: dict[str, object] = {}
    for encoding in ("q8", "fp32"):
        where = folder / f"{place.name}-{encoding}"
        # As much shared memory as the asynchronous peers use for their copy.
        arena_bytes = max(64 << 20, int(state.bytes * 1.1))
        flags = {
            "encoding": encoding,
            "differential": "consecutive",
            "compact_after": 0,
            "arena_bytes": arena_bytes,
        }
        run = f"stall-{encoding}"
        with SidecarServer(place, run, where, **flags) as sidecar:
            ours = Deltashard(sidecar, state)
            ours.restore()
            everything, some = [], []
            for turn in range(rounds + 1):
                ours.touch_and_step(1.0, seed=turn)
                everything.append(ours.save())
                ours.touch_and_step(DIRTY, seed=100 + turn)
                some.append(ours.save())
            ours.touch_and_step(
                1.0, seed=1000
            )  # the restores below read one full checkpoint, as the peers' restores do
            ours.save()
            ours.close()
            peak = sidecar.peak_anonymous_bytes
        sidecar.wipe_cache()
        restores = []
        for _ in range(rounds):
            with SidecarServer(place, run, where, **flags) as sidecar:
                sidecar.wait_idle()
                ours = Deltashard(sidecar, state)
                _, seconds = ours.restore()
                restores.append(seconds)
                ours.ckpt.close()
            sidecar.wipe_cache()
        keep = slice(1, None) if rounds > 1 else slice(None)
        found[encoding] = _summed(everything[keep], some[keep], restores, peak)
    return found


def _summed(
    everything: list[OurSave], some: list[OurSave], restores: list[float], peak: int
) -> dict[str, object]:
    return {
        **_times([s.saved for s in everything], restores),
        "stall_26_s": median(s.saved.stall_s for s in some),
        "stall_26_cpu_s": median(s.saved.stall_cpu_s for s in some),
        "best_stall_26_s": min(s.saved.stall_s for s in some),
        "durable_26_s": median(s.saved.durable_s for s in some),
        "stored_26_bytes": some[-1].saved.stored_bytes,
        "rows": everything[-1].rows,
        "rows_26": some[-1].rows,
        "sidecar_cpu_s_per_gb": sum(s.cpu_s for s in everything)
        / (sum(s.raw_bytes for s in everything) / GB),
        "sidecar_peak_anonymous_bytes": peak,
    }


def _measure_step(
    place: StoreLocation, state: states.TrainingState, folder: Path, *, calls: int
) -> dict[str, float]:
    with SidecarServer(place, "step", folder / "step") as sidecar:
        ours = Deltashard(sidecar, state)
        ours.restore()
        step = ours.ckpt.step
        for optimizer in state.optimizers:
            optimizer.step()
        plain = min(_timed(lambda: None, calls) for _ in range(5))
        timed = sorted(_timed(step, calls) for _ in range(5))
        ours.ckpt.close()
    return {"median": (timed[2] - plain) * 1e9 / calls, "best": (timed[0] - plain) * 1e9 / calls}


def _timed(call: Callable[[], object], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - begun


# Bytes over many intervals


def interval_rows(rows: int, intervals: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Return the rows each interval changes: 21 % that every interval changes and 5 % out of a pool of 40 %.

    26 % an interval, 30 % after two, 37 % after four, 52 % after eleven: the growth that Check-N-Run (NSDI'22)
    reports for production models, from any starting interval.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    hot, pool = order[: round(rows * 0.21)], order[round(rows * 0.21) : round(rows * 0.61)]
    for _ in range(intervals):
        some = torch.randperm(len(pool), generator=generator)[: round(rows * 0.05)]
        yield torch.cat([hot, pool[some]])


def _measure_sequences(
    place: StoreLocation, folder: Path, *, megabytes: int, intervals: int
) -> dict[str, object]:
    found: dict[str, object] = {}
    for encoding in ("q8", "q4", "q2"):
        state = states.build(megabytes=megabytes, pointwise=False, hidden=64)
        full = _full_bytes(state)
        tables = [table.shape[0] for table in state.rowwise]
        plans = [interval_rows(count, intervals, seed=i) for i, count in enumerate(tables)]
        run = f"sequence-{encoding}"
        flags = {
            "encoding": encoding,
            "differential": "intermittent",
            "keep_last": 3,
            "maintenance_interval_s": 0,
            "gc_grace_s": 0,
        }
        stored, kinds, held = [], [], []
        with SidecarServer(place, run, folder / run, **flags) as sidecar:
            ours = Deltashard(sidecar, state)
            ours.restore()
            for _ in range(intervals):
                state.touch_rows([next(plan) for plan in plans])
                ours.ckpt.step()
                save = ours.save()
                stored.append(save.saved.stored_bytes)
                kinds.append(save.baseline)
                held.append(place.size_bytes(run))
            ours.close()
        found[encoding] = {
            "full_bytes": full,
            "stored_bytes": stored,
            "baselines": kinds,
            "held_bytes": held,
            "fewer_bytes": full * len(stored) / sum(stored),
            # As many fulls as restorable checkpoints: keep_last.
            "less_capacity": 3 * full / median(held[3:]) if len(held) > 3 else None,
        }
    return found


def _full_bytes(state: states.TrainingState) -> int:
    with tempfile.NamedTemporaryFile() as out:
        torch.save(state.as_dict(), out.name)
        return Path(out.name).stat().st_size


# The table


def _rows(out: dict[str, object]) -> list[Row]:
    rows: list[Row] = []
    places: dict[str, dict[str, dict[str, dict[str, float]]]] = out["places"]  # type: ignore[assignment]
    for name, both in places.items():
        peers, q8 = both["peers"], both["ours"]["q8"]
        for peer, found in peers.items():
            if not found["asynchronous"]:
                continue
            for what, ours, theirs, bar in (
                ("stall, all rows dirty", "stall_s", "stall_s", 1.0),
                ("stall, 26 % dirty", "stall_26_s", "stall_s", 1 / 0.4),
                ("... processor time, all rows", "stall_cpu_s", "stall_cpu_s", None),
                ("... processor time, 26 %", "stall_26_cpu_s", "stall_cpu_s", None),
            ):
                rows.append(compare_with(f"{what}, {name}", q8[ours], peer, found[theirs], "s", bar))
        for what, key, barred, least in (
            ("trigger to durable, 8 bit", "durable_s", "dcp.async_save", 3.0),
            ("restore, 8 bit", "restore_s", "torch.save", 2.0),
        ):
            for peer, found in peers.items():
                bar = least if name == "MinIO" and peer == barred else None
                rows.append(compare_with(f"{what}, {name}", q8[key], peer, found[key], "s", bar))
        if (whole := peers.get("torch.save")) is not None:
            title = f"bytes of a full save, 8 bit, {name}"
            rows.append(compare_with(title, q8["stored_bytes"], "torch.save", whole["stored_bytes"], "B"))
    step: dict[str, float] = out["step_ns"]  # type: ignore[assignment]
    rows.append(limit("step() when nothing is due", step["median"], "ns", 2000))
    sequence: dict[str, dict[str, float]] = out["sequence"]  # type: ignore[assignment]
    for encoding, bytes_bar, capacity_bar in (("q8", 6.0, 2.5), ("q4", None, None), ("q2", 17.0, 8.0)):
        found = sequence[encoding]
        title = f"bytes a checkpoint, {encoding}, intermittent"
        rows.append(at_least(title, found["fewer_bytes"], bytes_bar, peer="torch.save of fulls"))
        if found["less_capacity"]:
            title = f"capacity held, {encoding}"
            rows.append(at_least(title, found["less_capacity"], capacity_bar, peer="3 fp32 fulls"))
    share = _mean_share(sequence["q8"])
    for name, both in places.items():
        q8 = both["ours"]["q8"]
        cpu, peak = q8["sidecar_cpu_s_per_gb"], q8["sidecar_peak_anonymous_bytes"] / 2**20
        title = f"one core's share at 30 min, 100 GB shard, {name}"
        rows += [
            limit(f"sidecar CPU-s per GB of rows, {name}", cpu, "CPU-s/GB"),
            limit(title, 100 * cpu * 100 * share / 1800, "%", 5.0),
            limit(f"sidecar memory beyond arena and cache, {name}", peak, "MiB", 256.0),
        ]
    return rows


def _mean_share(sequence: dict[str, object]) -> float:
    stored: list[int] = sequence["stored_bytes"]  # type: ignore[assignment]
    return sum(stored) / len(stored) / stored[0]
