"""One vocabulary: its words, and that no second list of them stands anywhere."""

from __future__ import annotations

import ast
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
    BITS_CHOICES,
    CHOICES,
    DIFFERENTIALS,
    ENCODING_CHOICES,
    ENCODINGS,
    STATE_ENCODINGS,
    ProtocolVersions,
    UnknownWord,
    bits_of,
    differential_named,
    encoding_named,
    stored_state_dtype,
)

ROOT = Path(__file__).parents[3]
PACKAGES = ("checkpoint", "trainer", "sidecar", "operator", "proto", "cli", "tools")
CRD = ROOT / "charts/deltashard/templates/crds/checkpointpolicies.yaml"


def test_names_and_codes_tell_encodings_apart() -> None:
    """Codes are the format's, forever."""
    assert {name: e.code for name, e in ENCODINGS.items()} == {
        "fp32": 1, "fp16": 2, "bf16": 3, "fp64": 4, "q8": 5, "q4": 6, "q3": 7, "q2": 8,
    }  # fmt: skip
    assert all(vocabulary.ENCODING_OF_CODE[e.code] is e for e in ENCODINGS.values())


def test_bits_mean_an_encoding_of_so_many_bits() -> None:
    """Each number of bits a user may say names one of the choices, of just those bits."""
    assert all(bits_of(name) == bits and name in ENCODING_CHOICES for bits, name in BITS_CHOICES.items())
    assert {bits_of(name) for name in ENCODING_CHOICES} == set(BITS_CHOICES)
    assert bits_of("q5") is None


def test_defaults_are_choices() -> None:
    """Every default may also be said."""
    assert vocabulary.DEFAULT_ENCODING in CHOICES["encoding"]
    assert vocabulary.DEFAULT_STATE_ENCODING in CHOICES["state_encoding"]
    assert vocabulary.DEFAULT_DIFFERENTIAL in CHOICES["differential"]


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    """The error names what was said and what may be said."""
    with pytest.raises(UnknownWord, match=r"unknown encoding 'q5' -- one of fp32, .*q2"):
        encoding_named("q5")
    with pytest.raises(UnknownWord, match=r"unknown differential policy 'half' -- one of full, one-shot"):
        differential_named("half")
    with pytest.raises(UnknownWord, match="unknown state encoding 'q8' -- one of fp32, bf16"):
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
def test_only_point_wise_float32_state_is_narrowed(
    state_encoding: str, pointwise: bool, dtype: str, stored: str
) -> None:
    """Row-wise state and other types are always exact."""
    assert stored_state_dtype(state_encoding, pointwise=pointwise, dtype=dtype) == stored


def test_the_newest_common_protocol_is_spoken() -> None:
    """Ranges that do not meet have none."""
    ours = ProtocolVersions(2, 4)
    assert [ours.common(*theirs) for theirs in ((1, 3), (3, 9), (4, 4), (5, 6), (1, 1))] == [
        3,
        4,
        4,
        None,
        None,
    ]


def _lists(tree: ast.AST) -> Iterator[list[str]]:
    """The strings of every tuple, list, set and dict (its keys) of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items: list[Any] = list(node.elts)
        elif isinstance(node, ast.Dict):
            items = list(node.keys)
        else:
            continue
        yield [n.value for n in items if isinstance(n, ast.Constant) and isinstance(n.value, str)]


@pytest.mark.slow
def test_no_second_list_of_names_stands_anywhere() -> None:
    """Two names of one kind side by side in code are a list, and lists are the vocabulary's."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name == "vocabulary.py" or path.stem.endswith("_pb2"):
                continue
            for strings in _lists(ast.parse(path.read_text())):
                if any(len(set(strings) & set(words)) > 1 for words in (ENCODINGS, DIFFERENTIALS)):
                    found.append((path.name, strings))
    # Not names but what is measured for each; held to them below.
    assert found == [("quantizer.py", ["q8", "q4", "q3", "q2"])]
    assert set(quantizer.DEFAULT_SEARCH) == {e.name for e in ENCODINGS.values() if e.quantized}


def _properties(document: Any) -> Iterator[tuple[str, Any]]:
    """(name, schema) of every property of a JSON schema, at any depth."""
    if isinstance(document, dict):
        for name, value in document.items():
            if isinstance(value, dict):
                yield name, value
            yield from _properties(value)
    elif isinstance(document, list):
        for value in document:
            yield from _properties(value)


@pytest.mark.parametrize("source", ["crd", "values"])
def test_schemas_of_the_chart_take_the_same_words(source: str) -> None:
    """A custom resource and the chart's values are refused by the API for what the sidecar would refuse."""
    if source == "crd":
        text = "\n".join(line for line in CRD.read_text().splitlines() if "{{" not in line)
        document = yaml.safe_load(text)
    else:
        document = json.loads((ROOT / "charts/deltashard/values.schema.json").read_text())
    enums = {name: schema["enum"] for name, schema in _properties(document) if "enum" in schema}
    assert enums["encoding"] == list(ENCODING_CHOICES)
    assert enums["differential"] == list(DIFFERENTIALS)


def test_prose_names_the_same_words() -> None:
    """What people read beside a field of the protocol or an argument of the Checkpointer is the whole list."""
    proto = (ROOT / "proto/deltashard/v1/trainer.proto").read_text()
    assert f"string encoding = 3;  // {' '.join(ENCODING_CHOICES)}\n" in proto
    assert f"string differential = 4;  // {' '.join(DIFFERENTIALS)}\n" in proto
    assert f"string state_encoding = 5;  // {' or '.join(STATE_ENCODINGS)}, point-wise" in proto
    arguments = Checkpointer.__init__.__doc__
    assert arguments is not None
    assert f"encoding: of embedding weights: {' '.join(ENCODING_CHOICES)} (the sidecar's" in arguments
    *first, last = DIFFERENTIALS
    assert f"differential: {', '.join(first)} or {last} (default)." in arguments
