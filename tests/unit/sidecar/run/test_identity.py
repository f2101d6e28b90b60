"""Which run a pod trains."""

from __future__ import annotations

import itertools

import pytest
from deltashard_sidecar import settings
from deltashard_sidecar.run.identity import AmbiguousRun, Identity, check_run_assignment, identity


def config(**environment: str) -> settings.Settings:
    known = {"URL": "memory://x", "RUN": "ns/job-uid", "OWNER": "ns/job-uid", "DIR": "/d", "CACHE_DIR": "/c"}
    return settings.load([], {f"DELTASHARD_{name}": text for name, text in {**known, **environment}.items()})


def test_pods_of_a_workload_share_its_run_by_default() -> None:
    """This holds for any number of ranks. A number in the name comes from the workload. A JobSet numbers its Jobs."""
    for numbers in ({}, {"INDEX": "3"}, {"INDEX": "3", "RUNS": "one"}, {"RUNS": "per-pod"}):
        assert identity(config(**numbers)) == Identity(run="ns/job-uid", owner="ns/job-uid")
    assert identity(config(OWNER="")) == Identity(run="ns/job-uid", owner="")
    own = config(INDEX="3", RUNS="per-pod")
    assert identity(own) == Identity(run="ns/job-uid-3", owner="ns/job-uid-3")
    pods = itertools.product(("0", "1", "11"), repeat=2)
    runs = {identity(config(INDEX=index, REPLICA=replica, RUNS="per-pod")).run for index, replica in pods}
    assert len(runs) == 9


@pytest.mark.parametrize(
    ("environment", "ranks", "refused"),
    [
        ({}, 1, False),
        ({"INDEX": "0", "PODS": "4"}, 4, False),
        ({"INDEX": "0", "PODS": "4"}, 1, True),
        ({"INDEX": "0", "PODS": "1"}, 1, False),
        ({"INDEX": "0"}, 1, False),  # a StatefulSet: the number of pods is unknown
        ({"INDEX": "1"}, 1, True),
        ({"INDEX": "0", "PODS": "2", "REPLICA": "1"}, 1, True),
        ({"INDEX": "3", "PODS": "4", "RUNS": "per-pod"}, 1, False),
        ({"INDEX": "3", "PODS": "4", "RUNS": "one"}, 1, False),
    ],
)
def test_independent_trainers_sharing_a_run_are_refused(
    environment: dict[str, str], ranks: int, refused: bool
) -> None:
    if not refused:
        check_run_assignment(config(**environment), ranks)
        return
    with pytest.raises(
        AmbiguousRun, match="trains alone.*per-pod.*init_process_group.*deltashard.io/runs: one"
    ):
        check_run_assignment(config(**environment), ranks)
