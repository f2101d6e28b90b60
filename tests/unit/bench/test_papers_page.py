"""The page of `make papers` says of every part what it found, and parts see what is wrong with their figures."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest

MACHINE = {"cpu": "a processor", "cores": 2, "load": 0.5, "python": "3.11", "versions": {"torch": "2"}}
HEADLINES = [
    {"what": "bytes", "paper": "6 x", "ours": "7 x", "met": True, "why": "never said"},
    {"what": "time", "paper": "1 s", "ours": "2 s", "met": False, "why": "one core"},
    {"what": "other", "paper": "3", "ours": "4", "met": None, "why": "not comparable"},
]


def test_a_page_of_parts(papers, tmp_path):
    report = papers("report")
    (tmp_path / "measured").mkdir()
    drawn = []
    first = SimpleNamespace(
        page=lambda found: f"## First\n\n{found['figure']}\n",
        plot=lambda _found, folder: drawn.append(folder),
    )
    found = {
        "machine": MACHINE,
        "command": "bench/papers/run.py",
        "parts": {
            "first": {"date": "a day", "took_s": 1.0, "found": {"figure": 42, "headlines": HEADLINES}},
            "second": {"date": "a day", "took_s": 2.0, "error": "OSError: gone"},
        },
    }
    page = report.write(found, {"first": first, "second": SimpleNamespace()}, tmp_path)
    text = page.read_text()
    assert "| bytes | 6 x | 7 x | met |" in text
    assert "| time | 1 s | 2 s | **missed**: one core |" in text
    assert "| other | 3 | 4 | not comparable |" in text
    assert "never said" not in text
    assert "## First\n\n42\n" in text
    assert "OSError: gone" in text
    assert "2 cores of a processor" in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert drawn == [tmp_path / "papers"]
    figures = (tmp_path / "measured" / "papers.json").read_text()
    assert json.loads(figures) == found
    rows = [line.strip(" ,") for line in figures.splitlines()]
    assert all(json.dumps(row) in rows for row in HEADLINES)


def test_paragraphs_are_wrapped_and_nothing_else(papers):
    report = papers("report")
    words = " ".join(["word"] * 60)
    row = "| " + " | ".join(["cell"] * 60) + " |"
    code = "```sh\n" + "x" * 200 + "\n\n" + words + "\n```"
    text = "\n\n".join(["## " + words, words, f"- {words}\n- {words}", row, code, words])
    found = report.wrapped(text)
    assert found.split() == text.split()
    assert "## " + words in found
    assert row in found
    assert code in found
    lines = found.split("\n")
    assert sum(len(line) > report.LINE for line in lines) == 4
    assert sum(line.startswith("- ") for line in lines) == 2
    assert sum(line.startswith("  word") for line in lines) >= 2
    assert report.wrapped(found) == found


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
