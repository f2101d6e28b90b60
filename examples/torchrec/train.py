"""A small DLRM of TorchRec, its tables sharded over the ranks of torchrun, with checkpoints.

    export DELTASHARD_URL=file:///tmp/store DELTASHARD_RUN=clicks
    torchrun --standalone --nproc_per_node 1 examples/torchrec/train.py

Run it again after a kill: training continues from the newest checkpoint. The lines that deltashard needs end in
"# <-". Fused optimizers need no line: deltashard finds their state in the model.
"""

from __future__ import annotations

import argparse
import logging
import os
from functools import partial

import deltashard
import torch
import torch.distributed as dist
from clicks import FEATURES, Clicks, batch_of
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.utils.data import DataLoader, DistributedSampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

BATCH_SIZE = 64
COLUMNS = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between checkpoints")
    parser.add_argument(
        "--encoding", help="of the rows: fp32 to resume bit for bit; q8 is the sidecar's default"
    )
    parser.add_argument("--steps", type=int, default=1000)
    return parser.parse_args()


def build() -> DistributedModelParallel:
    """Build the model: the planner places each table, and row-wise Adagrad updates it within the backward pass."""
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=COLUMNS, num_embeddings=rows, feature_names=[name])
        for name, rows in FEATURES.items()
    ]
    model = DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=Clicks.dense,
            dense_arch_layer_sizes=[64, COLUMNS],
            over_arch_layer_sizes=[64, 1],
        )
    )
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    return DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder(fused_params=fused)]
    )


def main() -> None:
    """Train for `--steps` steps, from the last checkpoint on."""
    args = arguments()
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank} %(message)s", force=True)
    logging.getLogger("deltashard").setLevel(logging.INFO)
    dist.init_process_group("gloo")
    torch.manual_seed(20260101)
    model = build()
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(named, partial(torch.optim.Adam, lr=1e-3))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    clicks = Clicks()
    sampler: DistributedSampler[int] = DistributedSampler(clicks, shuffle=True, seed=7)
    loader = DataLoader(clicks, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=batch_of, drop_last=True)

    ckpt = deltashard.Checkpointer(model, optimizer, every_s=args.every_s, encoding=args.encoding)  # <-
    resumed = ckpt.restore()  # <-
    step = resumed.step if resumed else 0
    loader = ckpt.wrap(loader, pipelined=True)  # <- the pipeline is ahead with its batches
    print(f"rank {rank} begins at step {step}", flush=True)

    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    with ckpt:  # <-
        while step < args.steps:
            sampler.set_epoch(loader.epoch)
            batches = iter(loader)
            while step < args.steps:
                try:
                    loss, _, _ = pipeline.progress(batches)
                except StopIteration:
                    break
                step += 1
                print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
                ckpt.step()  # <- the last statement of the loop body
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
