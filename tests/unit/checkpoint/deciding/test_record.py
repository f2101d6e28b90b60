"""The decider's record in commits: what is written and how it is read."""

import json
import random
from functools import reduce

import pytest
from deltashard_checkpoint.deciding import cost
from deltashard_checkpoint.deciding.cost import MAX_TEXT, BadProfile, Measure, Profile
from deltashard_checkpoint.deciding.evidence import Evidence
from deltashard_checkpoint.deciding.interval import Basis
from deltashard_checkpoint.deciding.record import CurrentChoice, Record, parse_metadata


def measure(seed: int) -> Measure:
    rng = random.Random(seed)
    return reduce(
        Measure.with_sample, (float(f"{rng.lognormvariate(0, 3):.4g}") for _ in range(50)), Measure()
    )


FULL = Record(
    profile=Profile(
        key="k" * 200, step_s=0.1234, save=measure(1), stall=measure(2), durable=measure(3), restore=measure(4),
        reschedule=measure(5),
    ),
    held=CurrentChoice(basis=Basis(seconds=123.456789, cost_s=-0.001, mtbf_s=1e6), goal="lost-work=300s 0.1 1e+06"),
    evidence=Evidence(exposure_s=123456.789, lossy=1.23456789, restores=2.3456789),
    closing=True,
)  # fmt: skip


def test_record_round_trips_within_its_size_limit() -> None:
    text = FULL.text()
    assert len(text) < MAX_TEXT * 3 / 4
    assert parse_metadata(text) == FULL
    assert cost.parse_metadata(text) == FULL.profile
    assert parse_metadata(Record(profile=Profile()).text()) == Record(profile=Profile())


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *(("held.seconds", 0), ("held.seconds", "60"), ("held.mtbf_s", float("inf")), ("held", 3)),
        *(("evidence.lossy", -1), ("evidence.lossy", True), ("evidence", None), ("step_s", -1.0)),
        *(
            ("save.n", -1), ("save.n", 10**400), ("save.n", True), ("save.squares", -1.0),
            ("save.mean", 1e300),
        ),
        *(("save.mean", float("nan")), ("durable.newest", ["x"])),
    ],
)  # fmt: skip
def test_nonsense_is_refused(where, value):
    """Any writer of the bucket may have written the record. No value of it may stop a sidecar."""
    document = json.loads(FULL.text())
    *path, last = where.split(".")
    at = document
    for each in path:
        at = at[each]
    at[last] = value
    with pytest.raises(BadProfile, match="cannot be read"):
        parse_metadata(json.dumps(document))
    for text in ("", "[]", "null", "[" * 3000, '{"n":' * 3000, "9" * 5000, FULL.text()[:-1]):
        with pytest.raises(BadProfile):
            parse_metadata(text)
