"""The "exact" of the demo of several ranks detects damage, a rank at another step, and gaps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from deltashard_checkpoint.format import typed_tree
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint import sample
from tests.support.tool import ROOT

pytestmark = pytest.mark.slow
TABLE = sample.schema(rows=200, pointwise=False)
BOXES = ([sample.box(TABLE, 0, 120, 0, 8)], [sample.box(TABLE, 120, 200, 0, 8)])
Held = dict[int, dict[str, Any]]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the demo's module, which is next to a script and in no package."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo" / "ranks"))
    for name in ("shard_checks", "content"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import shard_checks

    return shard_checks


class TwoRankRun:
    """Two ranks that saved steps 10 and 20, and the content of each rank at these steps."""

    def __init__(self, checks: ModuleType, folder: Path) -> None:
        self.url = f"file://{folder / 'store'}"
        self._checks = checks
        self.held: dict[int, Held] = {}
        run = sample.SampleRun(folder, store=open_store(self.url), world_size=2, layout=BOXES)
        model = sample.SampleModel(TABLE)
        self.steps: dict[int, int] = {}
        for step in (10, 20):
            model.train()
            head = torch.full((3,), float(step))
            self.held[step] = {
                rank: self._content(model, boxes[0].row_start, boxes[0].row_stop, head)
                for rank, boxes in enumerate(BOXES)
            }
            tensor = typed_tree.Tensor(dtype="float32", shape=(3,), data=head.view(torch.uint8).numpy().data)
            blobs = {
                "dense/head": typed_tree.encode(tensor).to_bytes(),
                "optim/0": typed_tree.encode({"state": {"head": {"exp_avg": tensor}}}).to_bytes(),
            }
            snapshot_id = [(boxes, model.frames(range(200), boxes[0], step=step)) for boxes in BOXES]
            self.steps[run.save([TABLE], snapshot_id, step=step, blobs=blobs)] = step
        run.cache.close()

    def _content(
        self, model: sample.SampleModel, first: int, stop: int, head: torch.Tensor
    ) -> dict[str, Any]:
        sums = [
            self._checks.sha256(torch.from_numpy(values[first:stop]))
            for values in (model.weights, model.fields["sum"])
        ]
        shard = {"table": TABLE.fqn, "rows": [first, stop], "weights": sums[0], "state": sums[1:]}
        return {
            "shards": [shard],
            "dense": self._checks.dense_of({"head": head}, {"head": {"exp_avg": head}}),
        }

    def compare(self, held: Held) -> Any:
        return self._checks.compare(self.url, sample.RUN, max(self.steps), held, self.steps, None)


@pytest.fixture
def ranks(checks: ModuleType, tmp_path: Path) -> TwoRankRun:
    return TwoRankRun(checks, tmp_path)


def _other(values: list[str] | str) -> Any:
    return ["0" * 64] if isinstance(values, list) else "0" * 64


UNKNOWN = "rank 1: items[120:200] holds what no checkpoint holds"
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "weights": (lambda rank: rank["shards"][0].update(weights=_other("")), UNKNOWN),
    "state of the rows": (lambda rank: rank["shards"][0].update(state=_other([])), UNKNOWN),
    "dense": (lambda rank: rank["dense"].update(head=_other("")), "rank 1: head"),
    "dense state is missing": (lambda rank: rank["dense"].pop("head:exp_avg"), "rank 1: head:exp_avg"),
    "surplus": (lambda rank: rank["dense"].update(extra="1"), "rank 1: extra"),
    "a gap": (lambda rank: rank["shards"].clear(), "the ranks hold 120 of 200 rows of items"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_difference_is_reported(ranks: TwoRankRun, name: str) -> None:
    damage, message = DAMAGES[name]
    assert ranks.compare(ranks.held[20]).exact
    assert not ranks.compare(ranks.held[20] | {0: ranks.held[10][0]}).exact
    held = copy.deepcopy(ranks.held[20])
    damage(held[1])
    assert ranks.compare(held).wrong == (message,)
