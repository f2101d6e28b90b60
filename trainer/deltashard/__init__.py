"""Crash-consistent checkpoints for embedding models: the API of a training script.

`Checkpointer` saves and restores, `open_checkpoint` reads a checkpoint without training, `ResumableSampler` shuffles a
dataset by seed and epoch, and `optim` has an exact row-wise optimizer.

```python
ckpt = deltashard.Checkpointer(model, optimizer, url="file:///data/ckpt", run="dlrm", every_s=30)
resumed = ckpt.restore()        # None: the run has no commit
loader = ckpt.wrap(loader)
for batch in loader:
    ...
    optimizer.step()
    ckpt.step()                 # the last statement of the loop body
ckpt.close()
```
"""

from __future__ import annotations

import os

# Forked DataLoader workers never use the library's gRPC channel. gRPC's fork handlers would only log to stderr at every
# fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "deltashard in a training script needs torch -- pip install 'deltashard[trainer,sidecar]'",
        name="torch",
    ) from None

from deltashard import errors, optim
from deltashard.checkpoint_reader import CheckpointReader, StoredRows, open_checkpoint
from deltashard.checkpointer import Checkpointer
from deltashard.doctor import Diagnosis
from deltashard.errors import DeltashardError, FencedError, SaveFailed
from deltashard.loader.resumable_sampler import ResumableSampler
from deltashard.partial.recovery import PartialRecovery as _PartialRecovery
from deltashard.restore import recovery_plan as _recovery_plan
from deltashard.restore.request import Restored
from deltashard.save.handle import Commit, SaveHandle, Stats
from deltashard.sharded import extension as _extension  # noqa: F401 - tracking asks it about TorchRec's modules
from deltashard.state.discovery import TableSettings
from deltashard.tracking.tracking import TrackingSettings

# The core does not import extras; extras are registered here.
_recovery_plan.FACTORIES.append(_PartialRecovery)

__all__ = [
    "CheckpointReader",
    "Checkpointer",
    "Commit",
    "DeltashardError",
    "Diagnosis",
    "FencedError",
    "Restored",
    "ResumableSampler",
    "SaveFailed",
    "SaveHandle",
    "Stats",
    "StoredRows",
    "TableSettings",
    "TrackingSettings",
    "errors",
    "open_checkpoint",
    "optim",
]
