"""The exit code of a process whose run another workload holds now."""

from __future__ import annotations

import sys

import pytest
from deltashard import exits
from deltashard.arguments import check_metadata
from deltashard.errors import FencedError, TakenOver, UserError


def because(error: Exception, cause: Exception) -> Exception:
    """`error` as Python has it after `raise error from cause`."""
    error.__cause__ = cause
    return error


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the hook that was there before saw; ours is installed over it."""
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: seen.append(error))
    monkeypatch.setattr(exits, "_installed", False)
    exits.install()
    exits.install()
    return seen


@pytest.mark.parametrize(
    "error",
    [
        TakenOver("over"),
        because(RuntimeError("the loop broke"), TakenOver("over")),
    ],
)
def test_a_takeover_that_nobody_caught_has_its_own_code(error: Exception, shown: list[BaseException]) -> None:
    """After the traceback that any error gets; a framework's wrapping does not hide it."""
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(type(error), error, error.__traceback__)
    assert ended.value.code == exits.EXIT_TAKEN_OVER == 79
    assert shown == [error]


@pytest.mark.parametrize("error", [FencedError("fenced"), because(ValueError("any"), KeyError("x"))])
def test_every_other_end_stays_what_it_was(error: Exception, shown: list[BaseException]) -> None:
    """A pod that its own workload replaced is an ordinary failure, which a restart mends."""
    sys.excepthook(type(error), error, error.__traceback__)
    assert shown == [error]


def test_names_of_metadata_that_are_ours_are_refused() -> None:
    """What the sidecar records of a directive cannot be said by a script."""
    check_metadata({"auc": 0.8, "deltashard": "fine"})
    check_metadata(None)
    with pytest.raises(UserError, match="choose another name"):
        check_metadata({"deltashard/directive": "{}"})
