"""The removal of any rule of the log makes the model fail: each rule is needed, and the model detects its absence."""

import pytest

from tests.crash.log_mutants import BOUND, MUTANTS, find_violation


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_model_detects_removed_rule(mutant):
    found = find_violation(mutant)
    assert found is not None, f"no violation in {BOUND} schedules without: {mutant.rule}"
    print(f"{mutant.rule}: found after {found[0]} schedules: {found[1]}")
