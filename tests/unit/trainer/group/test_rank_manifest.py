"""The manifests of all ranks give one layout, or an error that names the difference and the ranks."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard.errors import RanksDiffer
from deltashard.group.rank_manifest import RankManifest, agreed_layout
from deltashard_checkpoint.format.schema import Box


def half(rank: int, **changes: Any) -> RankManifest:
    """Return the manifest of one of two ranks. Each rank holds five rows of one table."""
    common: dict[str, Any] = {
        "facts": {"run": "r", "world size": 2},
        "tables": {"t": (10, 4)},
        "dense": {"top.weight": "torch.float32 [1, 4]"},
        "boxes": [Box(table="t", row_start=5 * rank, row_stop=5 * rank + 5, col_start=0, col_stop=4)],
    }
    return RankManifest(**(common | changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"facts": {"run": "other", "world size": 2}}, "than rank 0: run: 'r' on rank 0, 'other' on rank 1"),
        ({"tables": {"t": (11, 4)}}, "has table otherwise than rank 0: t: (10, 4) on rank 0, (11, 4) on rank 1"),
        ({"dense": {}}, "top.weight: 'torch.float32 [1, 4]' on rank 0, nothing on rank 1"),
        ({"dense": {f"d{i}": "x" for i in range(9)}}, "and 6 more"),
        ({"boxes": []}, "the ranks' shards do not make whole tables"),
        ({"boxes": half(0).boxes}, "the ranks' shards do not make whole tables"),
    ],
)  # fmt: skip
def test_differences_between_ranks_are_described(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RanksDiffer) as caught:
        agreed_layout([half(0), half(1, **changes)])
    assert sentence in caught.value.what
    assert caught.value.remedy
