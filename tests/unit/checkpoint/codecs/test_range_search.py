"""Range searches match numeric oracles; greedy equals its publication, and the default equals the best greedy."""

import pytest
from deltashard_checkpoint.codecs.quantizer import DEFAULT_SEARCH, PLAIN, Search

GREEDY_25 = Search(kind="greedy", bins=25, ratio=0.6)
GREEDY_45 = Search(kind="greedy", bins=45, ratio=0.2)
GREEDY_200 = Search(kind="greedy", bins=200, ratio=0.16)

# distribution, bits: mean L2 of asymmetric; ratio of greedy to it
ORACLES = {
    ("gaussian", 2): (0.1783, 0.720, 0.780, 0.810),
    ("gaussian", 3): (0.0763, 0.867, 0.861, 0.862),
    ("gaussian", 4): (0.0356, 0.936, 0.920, 0.910),
    ("student", 2): (0.242, 0.676, 0.733, 0.759),
    ("student", 4): (0.0487, 0.939, 0.924, 0.918),
}


@pytest.mark.parametrize(("kind", "bits"), ORACLES)
def test_errors_match_oracles_and_default_equals_best_greedy(kernel_set, reference, kind, bits):
    """float16 scales cost less than 1 %. Student rows have no fourth moment, so their errors have a wide tolerance."""
    x = reference.rows_like(kind, 4000, 64, seed=11)
    asymmetric, *ratios = ORACLES[kind, bits]
    plain = reference.mean_error(x, bits, PLAIN)
    assert plain == pytest.approx(asymmetric, rel=0.02 if kind == "gaussian" else 0.08)
    greedy = [reference.mean_error(x, bits, search) for search in (GREEDY_25, GREEDY_45, GREEDY_200)]
    assert [error / plain for error in greedy] == pytest.approx(ratios, rel=0.02)
    default = DEFAULT_SEARCH[f"q{bits}"]
    assert reference.mean_error(x, bits, default) <= greedy[0 if bits < 4 else 2] * 1.002
    best = GREEDY_25 if bits < 4 else GREEDY_200
    passes_of_greedy = 2 * int(best.bins * best.ratio + 1e-6) + 1
    assert (default.starts + default.passes - 1) * 4 <= passes_of_greedy


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 16, 65, 8192])
@pytest.mark.parametrize("encoding", ["q2", "q3", "q4", "q8"])
def test_searches_are_never_worse_than_plain(reference, encoding, columns):
    """The error is that of a whole row. One value outside the searched range may be off by more than a step."""
    x = reference.rows_like("student", 500 if columns < 100 else 20, columns, seed=columns)
    plain = reference.mean_error(x, int(encoding[1:]), PLAIN)
    for search in (GREEDY_25, DEFAULT_SEARCH[encoding], Search(kind="refit", starts=12, passes=4)):
        assert reference.mean_error(x, int(encoding[1:]), search) <= plain * 1.01 + 1e-9
