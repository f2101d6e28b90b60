"""Which recovery plan a Checkpointer takes, with and without an extra, and how a restore applies frames."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deltashard.errors import UserError
from deltashard.restore import recovery_plan
from deltashard.restore.frame_stream import FrameReceiver
from deltashard.restore.recovery_plan import RecoveryPlan, create_plan
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.frame import parse_frame
from deltashard_checkpoint.format.frame_encoder import EncodeOptions, encode_rows
from deltashard_checkpoint.format.row_block import RowBlock
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.vocabulary import encoding_named


def test_first_available_plan_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an extra, partial recovery is refused."""

    def plan(*factories: Any, partial: bool) -> RecoveryPlan:
        monkeypatch.setattr(recovery_plan, "FACTORIES", factories)
        return create_plan(SimpleNamespace(config=SimpleNamespace(partial=partial)))  # type: ignore[arg-type]

    with pytest.raises(UserError, match="not installed"):
        plan(partial=True)
    offered = RecoveryPlan()
    assert plan(lambda _: None, lambda _: offered, lambda _: RecoveryPlan(), partial=True) is offered


def test_rows_of_a_checkpoint_without_blobs_are_not_applied() -> None:
    """Without blobs nothing was checked, and an older checkpoint may be complete, so the model must not change."""
    schema = TableSchema(fqn="t", rows=1, columns=4, dtype="float32", fields=())
    weights = np.zeros((1, 4), np.float32)
    rows = RowBlock(schema=schema, ids=range(1), weights=weights, fields={}, columns=range(4))
    frame = encode_rows(rows, EncodeOptions(encoding=encoding_named("fp32")), step=1)
    with pytest.raises(InvalidCheckpoint, match="rng"):
        FrameReceiver(targets=None, check_blobs=None).take(parse_frame(frame.data), True)
