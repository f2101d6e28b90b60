"""Checks that the objects of a checkpoint's chain are still in the store."""

import numpy as np
import pytest
import structlog
from deltashard_checkpoint.log.chain import parts_of
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_sidecar.run.chain_watch import ChainBroken, ChainWatch
from deltashard_sidecar.telemetry.metric import Metrics

from tests.crash import log_victim


class WatchedChains:
    """A run of two chains and a watch over it."""

    def __init__(self, directory):
        self.store = MemoryStore()
        self.log = RunLog(self.store, "job", readers=1)
        attempt = open_attempt(self.log, owner="me", closing_wait_s=0.0).attempt
        rows = np.arange(log_victim.ROWS)
        self.base = log_victim.save(directory, self.log, attempt, 1, 1, rows, None)
        self.delta = log_victim.save(directory, self.log, attempt, 2, 2, rows[:4], self.base)
        self.other = log_victim.save(directory, self.log, attempt, 3, 3, rows, None)
        self.metrics = Metrics()
        self.watch = ChainWatch(self.store, metrics=self.metrics, log=structlog.get_logger())

    def check(self, seq, **more):
        manifests = Manifests(self.store, "job")
        self.watch.check(self.log.state, seq, manifests=manifests, deadline_s=10.0, **more)

    def objects(self, seq, ending):
        prefix = f"job/{parts_of(self.log.state, seq)[0].prefix}"
        return [info.key for info in self.store.list(prefix) if info.key.endswith(ending)]


@pytest.fixture
def watched(tmp_path):
    return WatchedChains(tmp_path)


@pytest.mark.parametrize(("ending", "data"), [(".pack", None), (".index", None), (".index", b"corrupt")])
def test_missing_or_damaged_objects_are_reported_and_not_used_as_base(watched, ending, data):
    (key,) = watched.objects(watched.base, ending)
    watched.store.delete([key])
    if data is not None:
        watched.store.put(key, data)
    for single_rank in (True, False):
        with pytest.raises(ChainBroken, match=f"{ending} .*-- the next save is a baseline"):
            watched.check(watched.delta, single_rank=single_rank)
    state = watched.log.state
    assert [watched.watch.is_broken(state, seq) for seq in (watched.base, watched.delta, watched.other)] == [
        data is None, True, False,
    ]  # fmt: skip
    assert watched.metrics.chain_broken._value.get() == 2
    watched.check(watched.other)


def test_baseline_checks_its_own_objects(watched):
    (part,) = parts_of(watched.log.state, watched.other)
    packs = [key.removeprefix("job/") for key in watched.objects(watched.other, ".pack")]
    watched.check(None, extra_indexes={part.index_key: packs})
    watched.store.delete([f"job/{packs[0]}"])
    with pytest.raises(ChainBroken, match="objects of this save"):
        watched.check(None, extra_indexes={part.index_key: packs})
