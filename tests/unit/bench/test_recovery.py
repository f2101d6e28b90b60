"""CPR's overheads: the paper's corners, and a comparison that is one."""

from __future__ import annotations

import itertools

import pytest
from deltashard_checkpoint.deciding.interval import pls_interval_s, young

HOUR = 3600.0


@pytest.fixture
def recovery(papers):
    return papers("recovery")


@pytest.fixture
def costs(recovery):
    def of(save_min, recover_min):
        return recovery.Costs(save_s=60 * save_min, recover_s=60 * recover_min, mtbf_s=20 * HOUR)

    return of


@pytest.mark.parametrize(
    ("save_min", "recover_min", "full", "partial"),
    [(3.7, 6.6, 8.40, 0.636), (3.9, 5.3, 8.50, 0.53), (3.5, 7.2, 8.2, 0.68)],
)
def test_the_papers_corners(recovery, costs, save_min, recover_min, full, partial):
    """8.2 to 8.5 % of full recovery against 0.53 to 0.68 % of partial, PLS 0.1 on 18 shards, a failure in 20 h."""
    found = recovery.cheaper(costs(save_min, recover_min), pls=0.1, shards=18)
    assert found.kind == "partial"
    assert found.interval_s == pytest.approx(72 * HOUR)
    assert 100 * found.full == pytest.approx(full, abs=0.06)
    assert 100 * found.partial == pytest.approx(partial, abs=0.01)


def test_the_cheaper_kind_is_taken_each_at_its_own_interval(recovery):
    kinds = set()
    for save_s, recover_s, mtbf_s, pls, shards in itertools.product(
        (0.01, 1.0, 300.0), (1.0, 600.0), (HOUR, 200 * HOUR), (1e-4, 0.1), (1, 64)
    ):
        given = recovery.Costs(save_s=save_s, recover_s=recover_s, mtbf_s=mtbf_s)
        found = recovery.cheaper(given, pls=pls, shards=shards)
        best_s = young(save_s, mtbf_s)
        assert found.full == pytest.approx(recovery.full_overhead(given, best_s))
        assert all(
            found.full <= recovery.full_overhead(given, best_s * by) * (1 + 1e-12)
            for by in (0.5, 0.9, 1.1, 2)
        )
        partial_s = pls_interval_s(pls, mtbf_s, shards)
        assert recovery.expected_pls(partial_s, mtbf_s, shards) == pytest.approx(pls)
        assert found.partial == recovery.partial_overhead(given, partial_s)
        assert (found.kind == "partial") is (found.partial < found.full)
        assert found.interval_s == (partial_s if found.kind == "partial" else best_s)
        kinds.add(found.kind)
    assert kinds == {"full", "partial"}
