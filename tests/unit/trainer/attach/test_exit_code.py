"""The exit code of a process whose run another workload holds now."""

from __future__ import annotations

import sys

import pytest
from deltashard.attach import exit_code
from deltashard.config import MAX_METADATA, check_pin, texts_of
from deltashard.errors import FencedError, TakenOver, UserError


def because(error: Exception, cause: Exception) -> Exception:
    """`error` as Python has it after `raise error from cause`."""
    error.__cause__ = cause
    return error


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, BaseException]]:
    """What ours, and after it the hook that was there before, saw of an error."""
    seen: list[tuple[str, BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: seen.append(("before", error)))
    monkeypatch.setattr(exit_code, "_installed", False)
    exit_code.install(lambda error: seen.append(("ours", error)))
    exit_code.install(lambda error: seen.append(("second", error)))
    return seen


@pytest.mark.parametrize(
    "error",
    [
        TakenOver("over"),
        because(RuntimeError("the loop broke"), TakenOver("over")),
    ],
)
def test_a_takeover_that_nobody_caught_has_its_own_code(
    error: Exception, shown: list[tuple[str, BaseException]]
) -> None:
    """After the traceback that any error gets; a framework's wrapping does not hide it."""
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(type(error), error, error.__traceback__)
    assert ended.value.code == exit_code.EXIT_TAKEN_OVER == 79
    assert shown == [("ours", error), ("before", error)]


@pytest.mark.parametrize("error", [FencedError("fenced"), because(ValueError("any"), KeyError("x"))])
def test_every_other_end_stays_what_it_was(error: Exception, shown: list[tuple[str, BaseException]]) -> None:
    """A pod that its own workload replaced is an ordinary failure, which a restart mends."""
    sys.excepthook(type(error), error, error.__traceback__)
    assert shown == [("ours", error), ("before", error)]


def test_names_of_metadata_that_are_ours_are_refused() -> None:
    """What the sidecar records of a directive cannot be said by a script."""
    assert texts_of({"auc": 0.8, "deltashard": "fine"}) == {"auc": "0.8", "deltashard": "fine"}
    assert texts_of(None) == {}
    with pytest.raises(UserError, match="choose another name"):
        texts_of({"deltashard/directive": "{}"})


@pytest.mark.parametrize(
    "metadata",
    [
        {"": "x"},
        {" auc": "x"},
        {"a\nb": "x"},
        {"n" * 201: "x"},
        {"lone": "\ud800"},
        {"\ud800": "x"},
        {"long": "x" * (MAX_METADATA + 1)},
        {str(i): "x" * 1000 for i in range(100)},
        [("auc", 1)],
    ],
)
def test_metadata_that_no_log_entry_holds_is_refused_at_save(metadata: object) -> None:
    """Told to the caller: later it would fail the save, or the commit, again and again."""
    with pytest.raises(UserError, match="metadata"):
        texts_of(metadata)  # type: ignore[arg-type]


@pytest.mark.parametrize("pin", ["", " best", "best ", "a\tb", "\ud800", "p" * 201, 7])
def test_pins_that_cannot_name_a_checkpoint_are_refused_at_save(pin: object) -> None:
    """One that can be said on a command line passes."""
    check_pin(None)
    check_pin("epoch 3/best-auc: 0.8, größte")
    with pytest.raises(UserError, match="pin= takes 1 to 200 printable characters"):
        check_pin(pin)
