"""TorchRec's random dataset under its sparse pipeline, which is two batches ahead; a scenario for `rank_zygote`."""

from __future__ import annotations

import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import deltashard
import torch
import xxhash

from tests.support.trainer.verdict import CapturedLog, bits, optimizer_bits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.datasets.random import RandomRecDataset
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

COLUMNS, ROWS, PASS, STEPS = 32, 300, 7, 18


def _model() -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(name=f"t{n}", embedding_dim=COLUMNS, num_embeddings=ROWS, feature_names=[f"f{n}"])
        for n in range(2)
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=4, dense_arch_layer_sizes=[8, COLUMNS], over_arch_layer_sizes=[8, 1],
    )  # fmt: skip
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
    return DistributedModelParallel(DLRMTrain(dlrm), device=torch.device("cpu"), sharders=sharders)


def train(rank: int, workdir: Path, endless: str, tower: str = "False", kill: str = "0") -> Any:
    """Train to the end from the newest checkpoint, or end by SIGKILL two steps after a save.

    `endless`: the dataset never ends, which is its default; otherwise a pass has 7 batches. `tower`: Adam gets all of
    `model.named_parameters()`, including the sharded tables, as in TorchRec's retrieval example.
    """
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    reported: list[str] = []
    CapturedLog(reported)
    torch.manual_seed(20260101)
    model = _model()
    parameters = model.named_parameters()
    named = dict(parameters if tower == "True" else in_backward_optimizer_filter(parameters))
    dense = KeyedOptimizerWrapper(named, partial(torch.optim.Adam, lr=1e-3))
    optimizer = dense if tower == "True" else CombinedOptimizer([model.fused_optimizer, dense])
    dataset = RandomRecDataset(
        keys=["f0", "f1"], batch_size=6, hash_size=ROWS, ids_per_feature=2, num_dense=4, manual_seed=40 + rank,
        num_batches=None if endless == "True" else PASS,
    )  # fmt: skip
    ckpt = deltashard.Checkpointer(
        model, optimizer, url=workdir / "store", run="run", encoding="fp32", every_steps=5, grace_s=None,
        arena_bytes=64 << 20,
    )  # fmt: skip
    resumed = ckpt.restore()
    reported += [f"note: {note}" for note in resumed.notes] if resumed else []
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    loader = ckpt.wrap(dataset, pipelined=True)
    while ckpt.steps < STEPS:
        batches = iter(loader)
        while ckpt.steps < STEPS:
            try:
                pipeline.progress(batches)
            except StopIteration:
                break
            ckpt.step()
            if ckpt.steps == int(kill) - 2:
                ckpt.save("user").wait(100)
            if ckpt.steps == int(kill):
                os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    found = optimizer_bits("dense", dense) | bits(
        "parameters", {n: p for n, p in model.named_parameters() if "over" in n or "dense" in n}
    )
    for name, parameter in model.named_parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        found |= bits(name, local if isinstance(local, torch.Tensor) else [])
    found |= bits("fused", {k: [shard.tensor for shard in v.local_shards()] if hasattr(v, "local_shards") else v
                            for state in model.fused_optimizer.state_dict()["state"].values() for k, v in state.items()})  # fmt: skip
    digests = {name: xxhash.xxh3_64_hexdigest(value) for name, value in found.items()}
    return {"digests": digests, "reported": reported, "resumed_at": resumed.step if resumed else 0}
