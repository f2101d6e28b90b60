"""Trees of fused optimizers of several ranks, and what a script hands over beside them."""

from __future__ import annotations

from typing import Any

import torch
from deltashard.sharded.fused_view import FusedView
from deltashard.state.discovery import Inventory
from deltashard.tracking.tracking import Tracking
from torch import nn


def _tree(**state: Any) -> dict[str, Any]:
    view = FusedView([], Inventory())
    return {**view.capture(), "groups": [{"params": sorted(state)}], "state": state}


def test_trees_of_ranks_become_one() -> None:
    """In any order; a rank without a table has an empty one."""
    trees = [_tree(), _tree(b={"lr": 1.0}), _tree(a={"lr": 2.0}, c={"lr": 3.0})]
    whole = _tree(a={"lr": 2.0}, b={"lr": 1.0}, c={"lr": 3.0})
    assert FusedView.merged(trees) == FusedView.merged(trees[::-1]) == whole
    assert FusedView.merged([trees[0]]) == trees[0]


def test_a_rank_without_shards_has_a_view_all_the_same() -> None:
    """Optimizers are numbered alike on every rank, and one group is one group."""
    view = FusedView([], Inventory())
    assert view.index == 0
    assert len(view.target.param_groups) == len(view.capture()["groups"]) == 1
    assert view.restore(_tree(a={"optimizer": "exact_sgd"})) == []


def test_a_model_without_sharded_modules_has_no_fused_optimizer() -> None:
    """Checkpoints of plain models stay as they are."""
    model = nn.Embedding(4, 2)
    tracking = Tracking(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [view.class_name for view in tracking.optimizers] == ["torch.optim.sgd.SGD"]
    tracking.close()
