"""The page of `make papers` says of every part what it found, and parts see what is wrong with their figures."""

from __future__ import annotations

import copy

import numpy as np
import pytest


def neo_found(neo):
    stored = {
        encoding: {
            state: {name: neo.expected_bytes(name, encoding, state) for name in neo.STATE_VALUES}
            for state in neo.STATES
        }
        for encoding in neo.ENCODINGS
    }
    resume = {
        "steps": 9, "saved_at": 5, "died_at": 7, "resumed_at": 5, "pairs": [8, 4], "uninterrupted": "ab",
        "resumed": "ab", "losses_equal": True,
    }  # fmt: skip
    pair = {
        "saved": "row_wise, 2", "restored": "row_wise, 1", "rows": 5, "tables": 1, "weights_equal": True,
        "state": 0.0, "trained_rows": 3,
    }  # fmt: skip
    return {
        "bytes": {"rows": 10, "columns": 64, "stored": stored},
        "resume": resume,
        "shardings": {"tables": {"t": 5}, "columns": 4, "pairs": [pair]},
    }


def test_neo_finds_what_is_wrong(papers):
    neo = papers("neo")
    good = neo_found(neo)
    assert neo.check(good) == []
    assert "12 T weights" in neo.page(good)
    for path, value, says in (
        (("bytes", "stored", "q4", "fp32", "Adam"), 300.0, "bytes a row"),
        (("resume", "resumed"), "cd", "not the uninterrupted one"),
        (("resume", "losses_equal"), False, "not the uninterrupted one"),
        (("resume", "resumed_at"), 4, "resumed at step 4"),
        (("shardings", "pairs", 0, "weights_equal"), False, "are others"),
        (("shardings", "pairs", 0, "state"), 1e-7, "off when restored"),
        (("shardings", "pairs", 0, "trained_rows"), 0, "no row had been trained"),
    ):
        bad = copy.deepcopy(good)
        at = bad
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        (said,) = neo.check(bad)
        assert says in said


def test_shards_are_put_together(papers, tmp_path):
    """By rows and columns; of accumulators of column shards the mean, by their widths."""
    neo = papers("neo")
    rows, columns = neo.BAGS["t_shops"], neo.COLUMNS
    whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    name = "bags.embedding_bags.t_shops.weight"
    quarter = columns // 4
    for rank, (start, stop, says) in enumerate(((0, quarter, 1.0), (quarter, columns, 5.0))):
        place = f"{name}|0:{rows}|{start}:{stop}"
        np.savez(
            tmp_path / f"a-{rank}.npz",
            **{f"{place}|weights": whole[:, start:stop], f"{place}|sum": np.full(rows, says, np.float32)},
        )
    for rank in range(2):
        place = f"{name}|{rank * rows // 2}:{(rank + 1) * rows // 2}|0:{columns}"
        half = slice(rank * rows // 2, (rank + 1) * rows // 2)
        np.savez(
            tmp_path / f"b-{rank}.npz",
            **{f"{place}|weights": whole[half], f"{place}|sum": np.full(rows // 2, 4.0, np.float32)},
        )
    a, b = neo.gathered(tmp_path, "a"), neo.gathered(tmp_path, "b")
    found = neo.compared(a, b)
    assert found == {
        "tables": 1, "rows": rows, "weights_equal": True, "state": 0.0, "trained_rows": rows
    }  # fmt: skip
    b[f"{name}|weights"][3, 7] += 1
    b[f"{name}|sum"][0] = 4.4
    found = neo.compared(a, b)
    assert not found["weights_equal"]
    assert found["state"] == pytest.approx(0.1)


@pytest.mark.slow
def test_check_n_run_finds_what_is_wrong(papers):
    """Of a source's cells: order by bits, by policy, and rows that do not come back."""
    part = papers("check_n_run_claims")
    reduction = {32: 1.0, 8: 3.5, 4: 6.5, 3: 8.0, 2: 11.0}
    better = {"full": (1, 1), "one-shot": (2.0, 0.7), "consecutive": (3.0, 0.35), "intermittent": (2.2, 0.75)}
    good = {
        "restored": {str(bits): True for bits in reduction},
        "cells": {
            policy: {
                str(bits): {"write": by * write, "capacity": by * capacity} for bits, by in reduction.items()
            }
            for policy, (write, capacity) in better.items()
        },
    }
    assert part._orders(good) == []
    for policy, bits, key, value, says in (
        ("full", "4", "write", 3.0, "does not grow with fewer bits"),
        ("intermittent", "8", "write", 11.0, "writes are not consecutive < intermittent < full"),
        ("one-shot", "8", "write", 8.0, "writes more than one-shot"),
        ("intermittent", "8", "capacity", 0.9, "held are not full < intermittent < consecutive"),
    ):
        bad = copy.deepcopy(good)
        bad["cells"][policy][bits][key] = value
        assert any(says in said for said in part._orders(bad)), says
    bad = copy.deepcopy(good)
    bad["restored"]["3"] = False
    assert part._orders(bad) == ["3 bit: policies restore different rows"]
