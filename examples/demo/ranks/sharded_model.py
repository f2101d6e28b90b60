"""The demo's model with its tables in TorchRec, sharded over the ranks: the same rows, the same dense half.

The pairs and the candidates are sharded by rows over the ranks; the items are whole on one rank. Tables are updated
by fused row-wise Adagrad within the backward pass, the dense half by Adam on gradients that DDP averages.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.distributed as dist
from baskets import BasketBatch
from model import COLUMNS, INITIAL_STD, PAIR_ROWS, Scorer, pairs, present, repeated
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # FBGEMM's CPU build warns at each import about missing operators
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

SHARDING = {
    "item": table_wise(rank=0, compute_kernel="fused"),
    "candidate": row_wise(compute_kernel="fused"),
    "pair": row_wise(compute_kernel="fused"),
}


class ShardedBasketModel(nn.Module):
    """`BasketModel` over an EmbeddingBagCollection, which has one bag of each feature for each (sample, candidate)."""

    def __init__(self, item_count: int) -> None:
        super().__init__()
        rows = {"item": item_count, "candidate": item_count, "pair": PAIR_ROWS}
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=COLUMNS,
                    num_embeddings=rows[name],
                    feature_names=[name],
                    pooling=PoolingType.SUM if name == "candidate" else PoolingType.MEAN,
                    init_fn=partial(nn.init.normal_, std=INITIAL_STD),
                )
                for name in SHARDING
            ],
            device=torch.device("meta"),
        )
        self.scorer = Scorer()

    def forward(self, batch: BasketBatch) -> Tensor:
        """Return logits, float32 [B, 1 + N]."""
        choice, sizes = repeated(batch), batch.sizes[repeated(batch)]
        looked_up = KeyedJaggedTensor.from_lengths_sync(
            keys=list(SHARDING),
            values=torch.cat(
                [batch.context[choice][present(batch)[choice]], batch.candidates.reshape(-1), pairs(batch)]
            ),
            lengths=torch.cat([sizes, torch.ones_like(sizes), sizes]).int(),
        )
        rows = self.tables(looked_up).to_dict()
        return self.scorer(batch, rows["item"], rows["candidate"], rows["pair"])


def build(item_count: int) -> DistributedModelParallel:
    """Build this rank's part of the model in the default process group."""
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    )
    model = ShardedBasketModel(item_count)
    world = dist.get_world_size()
    tables = construct_module_sharding_plan(
        model.tables, SHARDING, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": tables}),
        sharders=[sharder],
        # DDP rebuilds its buckets after its first step, so that more than two ranks sum gradients in another order from
        # the second step on, and in the first order after a restart. This setting keeps the order.
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
    )


def optimizer_of(model: DistributedModelParallel) -> CombinedOptimizer:
    """Return the fused optimizer of the tables, and Adam for the dense half."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, partial(torch.optim.Adam, lr=1e-3))]
    )
