"""Programs that once resumed wrongly without a warning, or crashed: each is exact, or a named warning reports it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.programs.dimension import DIMENSIONS, Spec, with_defaults
from tests.programs.program_runner import ProgramRunner

WAIT = {"save": "wait"}  # killed after step 8, its newest checkpoint is of step 6

_RULES = DIMENSIONS["table_rule"]
_TRAINED = {
    "dropout": True,
    "batch_norm": True,
    "workers": 2,
    "scheduler": "step",
    "differential": "consecutive",
    "content_hash": True,
}

EXACT: dict[str, Spec] = {
    "an iterable that counts its position in an attribute, under a pipeline": {"loader": "counting", "loop": "pipelined"},
    "an iterable that counts its position in an attribute": {"loader": "counting"},
    "a spare iterator, as frameworks make to probe a loader": {"between": "spare"},
    "a batch is read before training": {"between": "peek"},
    "a table that is frozen in mid-run": {"freeze": "table"},
    "a table that is unfrozen in mid-run": {"freeze": "unfreeze"},
    "zeroed gradients of a table that few batches use": {"tables": 2, "sparse": False, "table_rule": "adam", "rarely_used": True, "zero_grad": "zeros"},
    "zeroed gradients of a table that is frozen for a while": {"sparse": False, "table_rule": "adam", "freeze": "while", "zero_grad": "zeros"},
    "a save is requested between a batch and its step": {"save": "request", "kill": 8, "second_kill": 4},
    "a wrapper around an optimizer, with separate state": {"wrapper": "lookahead"},
    "random numbers drawn between restore and the first batch": {"restart": "draws", "dropout": True},
    "other workers of a map-style loader": {"restart": "workers"},
    "float64 tables and state, which fp32 would round": {"dtype": "float64"},
    **{f"a table under {rule}": {"table_rule": rule, "sparse": rule == "sparse_adam"} | _TRAINED for rule in _RULES},
    **{f"a sparse table under {rule}": {"table_rule": rule} | _TRAINED for rule in ("sgd", "momentum", "adagrad", "rowwise")},
}  # fmt: skip
REPORTED: dict[str, tuple[Spec, str]] = {
    "batches that are cached and repeated": ({"loop": "cycle"}, "without a new batch"),
    "batches in a list": ({"loop": "kept"}, "without a new batch"),
    "another batch size in mid-epoch": ({"restart": "batch_size"}, "batch_size"),
    "more samples in mid-epoch": ({"restart": "longer"}, "but it has changed"),
    "shuffling disabled in mid-epoch": ({"restart": "unshuffled"}, "but it has changed"),
    "other workers of a stateful loader": (
        {"loader": "stateful", "workers": 2, "restart": "workers"},
        "workers",
    ),
    "a generator that no checkpoint holds": ({"augment": "hidden"}, "content"),
    "a table that grows, and has its first size after the restart": ({"growth": "module"}, "tables.0"),
    "a parameter that grows": ({"growth": "parameter"}, "tables.0"),
    "an optimizer that is replaced": ({"replaced": "optimizer"}, "optimizer"),
}
WARNED: dict[str, tuple[Spec, str]] = {
    "another learning rate in the script": ({"restart": "rate"}, "lr"),
}
"""Exact, with a warning."""


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    with ProgramRunner() as runner:
        yield runner


def _verdict(runner: ProgramRunner, spec: Spec) -> dict[str, Any]:
    verdict = runner.verdict(with_defaults(WAIT | spec))
    assert verdict["outcome"] in ("exact", "reported"), verdict
    return verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_program_resumes_exactly(runner: ProgramRunner, name: str) -> None:
    verdict = _verdict(runner, EXACT[name])
    assert verdict["outcome"] == "exact", verdict
    assert verdict["restored"] > 0
    assert verdict["reported"] == [], "a false alarm"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REPORTED, *WARNED])
def test_program_reports_difference(runner: ProgramRunner, name: str) -> None:
    spec, text = (REPORTED | WARNED)[name]
    verdict = _verdict(runner, spec)
    assert verdict["outcome"] == ("exact" if name in WARNED else "reported"), verdict
    assert any(text in message for message in verdict["reported"]), verdict["reported"]
