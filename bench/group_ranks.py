"""The ranks of `bench/group.py`: they train, save and restore, as forks of a process that has imported everything."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from peers import DcpSave, Instant, StoreLocation
from tracking import Clock, clocked

SCRIPT = str(Path(__file__).resolve())
COLUMNS = 64
SHARES = (8, 4, 2, 2)
"""The share of each table in all rows, in sixteenths."""
ROW_BYTES = 4 * COLUMNS + 4
DIRTY = 0.26
TIMEOUT_S = 300
PR_SET_PDEATHSIG = 1
ENCODINGS = ("q8", "fp32")
PLAIN, CACHED = "dcp.async_save", "dcp.async_save (cached staging)"
LOAD = "dcp.load"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScale:
    """The size of the measurement."""

    state_bytes: int
    rounds: int
    """Counted rounds; one warm-up round precedes them."""
    pairs: int
    """Pairs of blocks of steps with and without a Checkpointer."""
    steps: int
    world: int = 4
    readers: int = 2

    @property
    def rows(self) -> list[int]:
        return [self.state_bytes // ROW_BYTES * share // sum(SHARES) for share in SHARES]


FULL = GroupScale(state_bytes=2 << 30, rounds=3, pairs=5, steps=40)
SMALL = GroupScale(state_bytes=64 << 20, rounds=1, pairs=2, steps=10)


class GroupTraining:
    """One rank's part of the model."""

    def __init__(self, scale: GroupScale) -> None:
        import torch
        import torch.distributed as dist
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torch import nn
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        class RankModel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.ebc = EmbeddingBagCollection(
                    tables=[
                        EmbeddingBagConfig(
                            name=f"t{n}", embedding_dim=COLUMNS, num_embeddings=rows, feature_names=[f"f{n}"]
                        )
                        for n, rows in enumerate(scale.rows)
                    ],
                    device=torch.device("meta"),
                )
                self.over = nn.Sequential(nn.Linear(len(SHARES) * COLUMNS, 512), nn.ReLU(), nn.Linear(512, 1))

            def forward(self, sparse: Any) -> torch.Tensor:
                return self.over(self.ebc(sparse).values()).squeeze(1)

        class RankSharder(EmbeddingBagCollectionSharder):
            def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
                return ["row_wise"]  # the planner omits it on CPUs

        self.scale, self.rank, self.world = scale, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(self.rank)
        sharders: Any = [
            RankSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05})
        ]
        model = RankModel()
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=self.world, local_world_size=self.world, compute_device="cpu"),
            constraints={
                f"t{n}": ParameterConstraints(sharding_types=["row_wise"]) for n in range(len(SHARES))
            },
        )
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
        self.dense = torch.optim.Adam(
            dict(in_backward_optimizer_filter(self.model.named_parameters())).values(), lr=1e-3
        )
        self._features = [f"f{n}" for n in range(len(SHARES))]
        self._tiny = self._bags([torch.arange(8)] * len(SHARES), 8)

    def _bags(self, ids: list[Any], bags: int) -> Any:
        """Return a batch of `bags` samples that distributes `ids` of each table over the bags."""
        import torch
        from torchrec import KeyedJaggedTensor

        lengths = [
            torch.tensor([len(part) for part in torch.tensor_split(each, bags)], dtype=torch.int64)
            for each in ids
        ]
        return KeyedJaggedTensor.from_lengths_sync(
            keys=self._features, values=torch.cat(ids), lengths=torch.cat(lengths)
        )

    def step(self, batch: Any = None) -> None:
        self.dense.zero_grad()
        (self.model(batch or self._tiny) - 1).square().mean().backward()
        self.dense.step()

    def touch(self, share: float, seed: int) -> None:
        """Run a step that looks up `share` of every table's rows in few bags; each rank looks up its part."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        ids = [
            torch.randperm(rows, generator=generator)[: round(rows * share)][self.rank :: self.world].clone()
            for rows in self.scale.rows
        ]
        self.step(self._bags(ids, 8))

    def ordinary(self, seed: int) -> Any:
        """Return a batch of 512 samples with 20 lookups per table that favours low ids."""
        import torch

        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        return self._bags(
            [(torch.rand(512 * 20, generator=generator) ** 2 * rows).long() for rows in self.scale.rows], 512
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what a script passes to DCP: ShardedTensors, by reference."""
        return {
            "model": self.model.state_dict(),
            "fused": self.model.fused_optimizer.state_dict(),
            "dense": self.dense.state_dict(),
        }

    def shards(self) -> dict[str, list[Any]]:
        """Return this rank's tensors of weights and optimizer state for all tables."""
        found: dict[str, list[Any]] = {"weights": [], "state": []}
        for value in self.model.state_dict().values():
            if hasattr(value, "local_shards"):
                found["weights"] += [shard.tensor for shard in value.local_shards()]
        for fields in self.model.fused_optimizer.state_dict()["state"].values():
            for value in fields.values():
                found["state"] += [shard.tensor for shard in value.local_shards()]
        return found

    def sums(self) -> dict[str, int]:
        import torch
        import torch.distributed as dist

        found = {}
        for what, tensors in self.shards().items():
            bits = [tensor.detach().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors]
            total = torch.stack(bits).sum()
            dist.all_reduce(total)
            found[what] = int(total)
        return found

    def wipe(self) -> None:
        for tensors in self.shards().values():
            for tensor in tensors:
                tensor.detach().zero_()

    def checkpointer(self, socket_path: str, *, fresh: bool = False) -> Any:
        from deltashard import Checkpointer

        os.environ["DELTASHARD_SOCKET"] = socket_path
        return Checkpointer(self.model, [self.dense], fresh=fresh, grace_s=None)


def _begin() -> Instant:
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    return Instant.now()


def _our_save(training: GroupTraining, ckpt: Any) -> dict[str, Any]:
    stall_s = stall_cpu_s = 0.0
    steps = 0
    begun = _begin()

    def held(call: Any) -> Any:
        nonlocal stall_s, stall_cpu_s
        before = Instant.now()
        result = call()
        after = Instant.now()
        stall_s += after.wall_s - before.wall_s
        stall_cpu_s += after.cpu_s - before.cpu_s
        return result

    snapshots = ckpt.stats.snapshots
    handle = held(lambda: ckpt.save("bench"))
    while ckpt.stats.snapshots == snapshots:
        training.step()
        held(ckpt.step)
        steps += 1
    commit = handle.wait(TIMEOUT_S)
    return {
        "stall_s": stall_s,
        "stall_cpu_s": stall_cpu_s,
        "snapshot_s": ckpt.stats.stalls_s[-1],
        "steps_to_snapshot": steps,
        "durable_s": time.perf_counter() - begun.wall_s,
        "baseline": commit.baseline,
        "rows": commit.rows,
    }


class _Dcp:
    """One rank's side of torch.distributed.checkpoint on MinIO."""

    def __init__(self, place: StoreLocation, *, cached: bool = False) -> None:
        import torch.distributed as dist

        self.storage = DcpSave(place)
        # The collectives of its thread need a group separate from training's.
        self.group = dist.new_group(backend="gloo")
        self.stager: Any = None
        if cached:
            from torch.distributed.checkpoint.staging import BlockingAsyncStager

            # DCP's newer stager cannot copy ShardedTensors; this one keeps its copy between saves.
            self.stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def _staged(self, state: dict[str, Any]) -> None:
        """Allocate the reused copy in ordinary memory; the stager's pinned memory needs CUDA."""
        from torch.distributed._state_dict_utils import _create_cpu_state_dict

        if self.stager is not None and self.stager.state_dict_cache is None:
            self.stager.state_dict_cache = _create_cpu_state_dict(state)

    def save(self, training: GroupTraining, tag: str) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        self._staged(training.as_dict())
        begun = _begin()
        future = dcp.async_save(
            training.as_dict(),
            storage_writer=self.storage.writer(tag),
            async_stager=self.stager,
            process_group=self.group,
        )
        released = Instant.now()
        training.step()
        future.result()
        return {
            "stall_s": released.wall_s - begun.wall_s,
            "stall_cpu_s": released.cpu_s - begun.cpu_s,
            "durable_s": time.perf_counter() - begun.wall_s,
        }

    def load(self, training: GroupTraining, tag: str) -> float:
        import torch.distributed.checkpoint as dcp

        begun = _begin()
        target = training.as_dict()
        dcp.load(target, storage_reader=self.storage.reader(tag), process_group=self.group)
        training.dense.load_state_dict(target["dense"])
        return time.perf_counter() - begun.wall_s


def save(scale: GroupScale, place: StoreLocation, sockets: dict[str, list[str]]) -> dict[str, Any]:
    """Run all saves of one rank; the last save of each side remains for `restore`."""
    import torch.distributed as dist

    training = GroupTraining(scale)
    training.touch(1.0, seed=1)
    first = training.rank == 0
    peers = {PLAIN: _Dcp(place), CACHED: _Dcp(place, cached=True)}
    found: dict[str, Any] = {"rounds": [], "sums": {}}
    for turn in range(scale.rounds + 1):
        this: dict[str, Any] = {}
        for encoding in ENCODINGS:
            (socket_path,) = sockets[encoding]
            ckpt = training.checkpointer(socket_path, fresh=True)
            training.step()
            ckpt.step()
            for what in ("all", "some"):
                if what == "some":
                    training.touch(DIRTY, seed=100 + turn)
                    ckpt.step()
                before = place.size_bytes(encoding) if first else 0
                reported = _our_save(training, ckpt)
                reported["stored_bytes"] = place.size_bytes(encoding) - before if first else 0
                this[f"{encoding} {what}"] = reported
            found["sums"][encoding] = training.sums()
            ckpt.close()
        for name, peer in peers.items():
            tag = f"{name.split()[-1].strip('()')}-{turn}"
            sums = training.sums()
            this[name] = peer.save(training, tag)
            this[name]["stored_bytes"] = place.size_bytes(tag) if first else 0
            dist.barrier()
            if name == PLAIN and turn == scale.rounds:
                found["tag"], found["sums"][LOAD] = tag, sums
            elif first:
                place.remove(tag)
        found["rounds"].append(this)
    found["step"] = _steps(training, sockets["step"])
    return found


def _steps(training: GroupTraining, sockets: list[str]) -> dict[str, Any]:
    import torch.distributed as dist
    from deltashard.sharded import batched_kernel
    from deltashard.tracking.step_hook import StepHooks

    batches = [training.ordinary(seed) for seed in range(8)]
    scale, clock = training.scale, Clock()
    owners = [
        (batched_kernel.BatchedKernel, "updated"),
        (batched_kernel._LookupHook, "__call__"),  # noqa: SLF001
        (StepHooks, "before"),
        (StepHooks, "after"),
    ]
    collectives = {True: 0, False: 0}
    counted = dist.group.WORLD._get_sequence_number_for_group  # noqa: SLF001 - number of collectives so far

    def block(ckpt: Any) -> tuple[float, float, float]:
        """Return median seconds and this rank's processor seconds per step, and the median share in our functions."""
        end = None if ckpt is None else clock.timed(ckpt.step)
        steps_s, shares = [], []
        for step in range(scale.steps + 5):
            if step == 5:  # the steps before are warm-up
                gc.collect()
                dist.barrier()
                cpu, count = time.process_time(), counted()
            begun, inside = time.perf_counter(), clock.seconds
            training.step(batches[step % len(batches)])
            if end is not None:
                end()
            if step >= 5:
                steps_s.append(time.perf_counter() - begun)
                shares.append((clock.seconds - inside) / steps_s[-1])
        collectives[ckpt is not None] = counted() - count
        return median(steps_s), (time.process_time() - cpu) / scale.steps, median(shares)

    with clocked(clock, owners):
        pairs = []
        for pair in range(scale.pairs):
            both = {}
            for which in (False, True) if pair % 2 else (True, False):
                ckpt = training.checkpointer(sockets[pair], fresh=True) if which else None
                both[which] = block(ckpt)
                if ckpt is not None:
                    ckpt.close()
            pairs.append({"with": both[True], "without": both[False]})
    return {"pairs": pairs, "collectives": {"with": collectives[True], "without": collectives[False]}}


def restore(
    scale: GroupScale, place: StoreLocation, sockets: dict[str, list[str]], tag: str, sums: dict[str, Any]
) -> dict[str, Any]:
    """Run every restore of one rank of the smaller world and compare each with the saved state."""
    training = GroupTraining(scale)
    peer = _Dcp(place)
    training.step()  # DCP loads into existing optimizer state
    found: dict[str, list[float]] = {name: [] for name in (*ENCODINGS, LOAD)}
    for turn in range(scale.rounds):
        for encoding in ENCODINGS:
            training.wipe()
            ckpt = training.checkpointer(sockets[encoding][turn])
            begun = _begin()
            assert ckpt.restore() is not None
            found[encoding].append(time.perf_counter() - begun.wall_s)
            _compare(encoding, sums[encoding], training.sums())
            ckpt.close()
        training.wipe()
        found[LOAD].append(peer.load(training, tag))
        _compare(LOAD, sums[LOAD], training.sums())
    return {"restore_s": found}


def _compare(name: str, saved: dict[str, int], restored: dict[str, int]) -> None:
    for what in ("state",) if name == "q8" else ("weights", "state"):
        if saved[what] != restored[what]:
            raise RuntimeError(f"{name} did not bring the saved {what} back: {saved} {restored}")


def _ranks(asked: dict[str, Any]) -> int:
    warnings.simplefilter("ignore")
    # Import once for all ranks.
    import deltashard  # noqa: F401
    import s3fs  # noqa: F401
    import torch.distributed.checkpoint._fsspec_filesystem  # noqa: F401
    import torchrec.distributed.planner  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(asked["world"]):
        child = os.fork()
        if child == 0:
            code = 1
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end the ranks together with the bench
            try:
                code = _rank(rank, port, asked)
            finally:
                os._exit(code)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _rank(rank: int, port: int, asked: dict[str, Any]) -> int:
    import torch
    import torch.distributed as dist

    world, folder = asked["world"], Path(asked["folder"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_S)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        does = {"save": save, "restore": restore}[asked["does"]]
        found = does(
            GroupScale(**asked["scale"]),
            StoreLocation(**asked["place"]),
            asked["sockets"],
            **asked["options"],
        )
    except BaseException:
        traceback.print_exc()
        return 1
    (folder / f"out-{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # rank 0 hosts the store
    return 0


if __name__ == "__main__":
    sys.exit(_ranks(json.loads(sys.argv[1])))
