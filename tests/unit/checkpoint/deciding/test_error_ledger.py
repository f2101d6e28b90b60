"""The error ledger of restores: kept over commits, counted at restores, bounded and validated."""

import pytest
from deltashard_checkpoint.deciding import error_ledger
from deltashard_checkpoint.deciding.error_ledger import BadErrorLedger, ErrorLedger
from hypothesis import given
from hypothesis import strategies as st

shares = st.floats(0, 10, allow_nan=False).map(lambda x: float(f"{x:.4g}"))


@given(
    spent=st.dictionaries(st.text(min_size=1, max_size=20), shares.filter(bool), max_size=8),
    error=st.dictionaries(st.text(min_size=1, max_size=20), shares.filter(bool), max_size=8),
    restores=st.integers(0, 10_000),
)
def test_record_round_trips(spent: dict[str, float], error: dict[str, float], restores: int) -> None:
    ledger = ErrorLedger(restores=restores, spent=spent, error=error)
    assert error_ledger.parse_metadata(ledger.text()) == ledger


def test_each_restore_adds_its_squared_error() -> None:
    """Two restores of a checkpoint with an error of .3 add .18. A table without an error adds nothing."""
    ledger = ErrorLedger(spent={"a": 0.01}, error={"b": 0.3})
    once = ledger.after_restore()
    assert once.restores == 1
    assert once.spent == pytest.approx({"a": 0.01, "b": 0.09})
    assert once.error == {}
    assert ErrorLedger(spent=once.spent, error={"b": 0.3}).after_restore().spent["b"] == pytest.approx(0.18)


def test_tables_with_the_largest_error_are_recorded_when_over_the_limit() -> None:
    spent = {f"table.{n:05}": n / 1000 for n in range(1, 5000)}
    text = ErrorLedger(spent=spent).text()
    found = error_ledger.parse_metadata(text)
    assert len(text) <= error_ledger.MAX_TEXT
    assert min(found.spent.values()) > max(spent[name] for name in spent.keys() - found.spent.keys())


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"restores":true,"tables":{}}', "{" * 5000, "x" * 40_000),
        *('{"restores":1,"tables":{"a":[1' + more + "]}}" for more in ("", ",-1", ",NaN")),
    ],
)
def test_malformed_record_is_refused(text: str) -> None:
    """Any writer of the bucket may have written the record."""
    with pytest.raises(BadErrorLedger):
        error_ledger.parse_metadata(text)
