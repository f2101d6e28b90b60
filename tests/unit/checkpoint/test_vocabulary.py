"""The shared vocabulary, and a check that no second list of its values exists."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltashard import Checkpointer
from deltashard_checkpoint import vocabulary
from deltashard_checkpoint.codecs import quantizer
from deltashard_checkpoint.vocabulary import (
    DIFFERENTIALS,
    ENCODING_CHOICES,
    ENCODINGS,
    STATE_ENCODINGS,
    ProtocolVersions,
    UnknownName,
    differential_named,
    encoding_named,
    stored_state_dtype,
)

ROOT = Path(__file__).parents[3]
CRD = ROOT / "charts/deltashard/templates/crds/checkpointpolicies.yaml"


def test_encoding_names_and_codes_are_unique() -> None:
    assert {name: e.code for name, e in ENCODINGS.items()} == {
        "fp32": 1, "fp16": 2, "bf16": 3, "fp64": 4, "q8": 5, "q4": 6, "q3": 7, "q2": 8,
    }  # fmt: skip
    assert all(vocabulary.ENCODING_OF_CODE[e.code] is e for e in ENCODINGS.values())
    assert set(quantizer.DEFAULT_SEARCH) == {e.name for e in ENCODINGS.values() if e.quantized}


def test_unknown_names_are_refused_with_the_valid_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown encoding 'q5' -- one of fp32, .*q2"):
        encoding_named("q5")
    with pytest.raises(UnknownName, match=r"unknown differential policy 'half' -- one of full, one-shot"):
        differential_named("half")
    with pytest.raises(UnknownName, match="unknown state encoding 'q8' -- one of fp32, bf16"):
        stored_state_dtype("q8", pointwise=True, dtype="float32")
    assert encoding_named("q3") is ENCODINGS["q3"]
    assert [differential_named(name) for name in DIFFERENTIALS] == list(DIFFERENTIALS)


@pytest.mark.parametrize(
    ("state_encoding", "pointwise", "dtype", "stored"),
    [
        ("fp32", True, "float32", "float32"),
        ("bf16", True, "float32", "bfloat16"),
        ("bf16", False, "float32", "float32"),
        ("bf16", True, "float64", "float64"),
    ],
)
def test_only_point_wise_float32_state_is_narrowed(state_encoding, pointwise, dtype, stored):
    assert stored_state_dtype(state_encoding, pointwise=pointwise, dtype=dtype) == stored


def test_newest_common_protocol_is_chosen() -> None:
    mine = ProtocolVersions(2, 4)
    others = ((1, 3), (3, 9), (4, 4), (5, 6), (1, 1))
    assert [mine.common(*peer) for peer in others] == [3, 4, 4, None, None]


def _enums(document: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, its values) of every property of a JSON schema that has an enum, at any depth."""
    values = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for name, value in values:
        if isinstance(value, dict) and "enum" in value:
            yield name, value["enum"]
        yield from _enums(value)


def test_chart_schemas_have_the_same_enums():
    """The API refuses a custom resource and the chart's values for what the sidecar would refuse."""
    crd = "\n".join(line for line in CRD.read_text().splitlines() if "{{" not in line)
    values = (ROOT / "charts/deltashard/values.schema.json").read_text()
    for document in (yaml.safe_load(crd), json.loads(values)):
        enums = dict(_enums(document))
        assert (enums["encoding"], enums["differential"]) == (list(ENCODING_CHOICES), list(DIFFERENTIALS))


def test_documentation_lists_the_same_values() -> None:
    proto = (ROOT / "proto/deltashard/v1/trainer.proto").read_text()
    assert f"string encoding = 3;  // {' '.join(ENCODING_CHOICES)}\n" in proto
    assert f"string differential = 4;  // {' '.join(DIFFERENTIALS)}\n" in proto
    assert f"string state_encoding = 5;  // {' or '.join(STATE_ENCODINGS)}, point-wise" in proto
    arguments = Checkpointer.__init__.__doc__
    assert arguments is not None
    *most, fewest = ENCODING_CHOICES
    assert (
        f"encoding: Encoding of embedding weights: {', '.join(most)} or {fewest}. The sidecar's" in arguments
    )
    *first, last = DIFFERENTIALS
    assert f"differential: Rows of a save: {', '.join(first)} or {last} (sidecar default)." in arguments
