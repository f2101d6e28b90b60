"""A Checkpointer without a sidecar and without the rows of tables: it captures blobs and restores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltashard import config
from deltashard.attach.rank import Rank
from deltashard.loader.registry import LoaderRegistry
from deltashard.program import Program as Parts
from deltashard.restore.blob import Blobs
from deltashard.save.capture import Capture
from deltashard.tracking.tracking import Tracking
from torch import nn


class BlobProgram:
    """The program of a model, its optimizers and the `state=` argument."""

    def __init__(self, model: nn.Module, optimizer: Any = (), **state: Any) -> None:
        config.check_model(model)
        self.model = model
        config.optimizers_of(optimizer, model)
        self.tracking = Tracking(model, optimizer)
        self.parts = Parts(self.tracking, state)
        self.capture = Capture(self.parts, LoaderRegistry(lambda: 0), rank=Rank())

    def take_snapshot(self) -> dict[str, memoryview]:
        self.tracking.adopt()
        self.tracking.refresh()
        return {name: memoryview(tree.to_bytes()) for name, tree in self.capture.blobs(0, None)}

    def restore(
        self,
        raw: Mapping[str, memoryview],
        *,
        strict: bool = True,
        weights_only: bool = False,
        script: bool = False,
    ) -> list[str]:
        """Restore everything but rows, as `restore()` does; return the notes."""
        blobs = Blobs.decode(raw)
        notes = blobs.check(self.parts, strict=strict, weights_only=weights_only)
        notes += blobs.apply_dense(self.parts, strict=strict, weights_only=weights_only, script=script)
        if not weights_only:
            notes += blobs.apply_state(self.parts, strict=strict, script=script)
        return notes
