"""The training state that every checkpointer of the bench saves: the same bytes for ours and for the peers.

Three tables with row-wise Adagrad state, one with point-wise Adagrad state and a dense MLP with Adam: a small DLRM.
`touch` changes a share of the rows as training does: weights and optimizer state together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

COLUMNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """A model and its optimizers, with non-empty state."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    rowwise: list[nn.Parameter]
    pointwise: list[nn.Parameter]

    def as_dict(self) -> dict[str, object]:
        return {
            "model": self.model.state_dict(),
            "optimizers": {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)},
        }

    def load(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state["optimizers"][str(i)])  # type: ignore[index]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.as_dict()))

    @property
    def rows(self) -> int:
        return sum(table.shape[0] for table in (*self.rowwise, *self.pointwise))

    def touch(self, share: float, seed: int) -> None:
        """Change `share` of every table's rows, chosen at random, and all dense parameters."""
        generator = torch.Generator().manual_seed(seed)
        counts = [table.shape[0] for table in (*self.rowwise, *self.pointwise)]
        self.touch_rows([torch.randperm(n, generator=generator)[: round(n * share)] for n in counts], seed)

    def touch_rows(self, rows: list[torch.Tensor], seed: int = 0) -> None:
        """Change these rows of each table as a training step does: lookups, backward, optimizer step."""
        generator = torch.Generator().manual_seed(seed)
        bags = (*self.model.tables, *self.model.pointwise)  # type: ignore[misc]
        for bag, touched in zip(bags, rows, strict=True):
            values = torch.randn(len(touched), COLUMNS, generator=generator) * 0.01
            (bag(touched[:, None]) * values).sum().backward()
        self.model.mlp(torch.randn(8, 256, generator=generator)).sum().backward()  # type: ignore[operator]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _tensors(tree: object) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in _tensors(value)]
    if isinstance(tree, list | tuple):
        return [tensor for value in tree for tensor in _tensors(value)]
    return []


class _Model(nn.Module):
    def __init__(self, rows: int, pointwise_rows: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(count, COLUMNS, mode="sum", sparse=True) for count in (rows, rows // 2, rows // 4)
        )
        self.pointwise = nn.ModuleList()
        if pointwise_rows:
            self.pointwise.append(nn.EmbeddingBag(pointwise_rows, COLUMNS, mode="sum", sparse=True))
        self.mlp = nn.Sequential(nn.Linear(256, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        for table in (*self.tables, *self.pointwise):
            nn.init.normal_(table.weight, std=0.05)


def build(*, megabytes: int, pointwise: bool = True, hidden: int = 512, seed: int = 0) -> TrainingState:
    """Build a state of about `megabytes` (10^6), every row's optimizer state non-zero.

    Without `pointwise` all tables have row-wise state, as the production models behind the bars for bytes have.
    """
    from deltashard.optim import RowWiseAdagrad

    torch.manual_seed(seed)
    # rows * (1 + 1/2 + 1/4) with row-wise state, rows / 4 with point-wise state.
    row_bytes = 1.75 * (COLUMNS * 4 + 4) + (0.25 * COLUMNS * 8 if pointwise else 0)
    rows = int(megabytes * 1e6 / row_bytes)
    model = _Model(rows, rows // 4 if pointwise else 0, hidden)
    by_row = [table.weight for table in model.tables]
    by_point = [table.weight for table in model.pointwise]
    optimizers: list[torch.optim.Optimizer] = [
        RowWiseAdagrad(by_row, lr=0.05),
        torch.optim.Adam(model.mlp.parameters(), lr=1e-3),
    ]
    if by_point:
        optimizers.append(torch.optim.Adagrad(by_point, lr=0.05))
    state = TrainingState(model=model, optimizers=optimizers, rowwise=by_row, pointwise=by_point)
    state.touch(1.0, seed=seed + 1)
    return state
