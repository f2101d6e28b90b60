"""Which run a pod trains."""

from __future__ import annotations

import pytest
from deltashard_sidecar import settings
from deltashard_sidecar.run.identity import Identity, identity


def config(**environment: str) -> settings.Settings:
    known = {"URL": "memory://x", "RUN": "ns/job-uid", "OWNER": "ns/job-uid", "DIR": "/d", "CACHE_DIR": "/c"}
    return settings.load([], {f"DELTASHARD_{name}": text for name, text in {**known, **environment}.items()})


def test_a_pod_without_a_number_is_known_at_once() -> None:
    """One pod, or a laptop: nothing has to be waited for."""
    for world_size in (None, 1, 8):
        assert identity(config(), world_size) == Identity(run="ns/job-uid", owner="ns/job-uid")
    assert identity(config(OWNER=""), None) == Identity(run="ns/job-uid", owner="")


def test_numbered_pods_are_told_apart_by_the_trainers_world_size() -> None:
    """Alone each is a run of its own; as ranks of one group they share one."""
    numbered = config(INDEX="3")
    assert identity(numbered, None) is None
    assert identity(numbered, 1) == Identity(run="ns/job-uid-3", owner="ns/job-uid-3")
    assert identity(numbered, 4) == Identity(run="ns/job-uid", owner="ns/job-uid")


def test_no_two_pods_of_a_jobset_share_a_key() -> None:
    """Its Jobs number their pods anew, each from 0."""
    runs = [
        identity(config(INDEX=index, REPLICA=replica), 1)
        for replica in ("0", "1", "11")
        for index in ("0", "1", "11")
    ]
    assert len({one.run for one in runs if one is not None}) == 9


@pytest.mark.parametrize("name", ["pod_name", "pod_namespace", "pod_uid", "node_name"])
def test_the_downward_api_has_its_usual_names(name: str) -> None:
    """POD_NAME, not DELTASHARD_POD_NAME."""
    assert settings.variable_of(name) == name.upper()
    assert getattr(settings.load([], {
        "DELTASHARD_URL": "memory://x", "DELTASHARD_RUN": "r", "DELTASHARD_DIR": "/d", "DELTASHARD_CACHE_DIR": "/c",
        name.upper(): "it",
    }), name) == "it"  # fmt: skip
