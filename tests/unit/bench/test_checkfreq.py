"""The part of CheckFreq sees what is wrong with its figures, says what did not run, and reads a sidecar's decisions."""

from __future__ import annotations

import copy
import json

import pytest


def arm(overhead=0.008, error=0.001):
    return {
        "overhead": overhead, "error": error, "cost_s": 0.01, "saves": 9, "of": 10, "step_s": 0.01,
        "interval_s": 1.25, "interval_steps": 120.0, "lost_steps": 70.0, "lost_most": 150, "durable_s": 0.2,
        "stall_s": 0.002, "failures": 0,
    }  # fmt: skip


def phase(name, **changes):
    return {"name": name, "steps": [0, 9], "seconds": 10.0, "later": arm(**changes)} | arm(**changes)


@pytest.fixture
def found(papers):
    phases = [phase("quiet"), phase("busy", overhead=0.03), phase("quiet again")]
    decision = {"at_s": -1.0, "interval": "every 1.2 s", "cause": "measured", "why": "a save costs 9 ms"}
    run = {
        "phases": phases,
        "windows": [
            {"at_s": 1.0, "overhead": 0.01, "saves": 2, "step_s": 0.01},
            {"at_s": 3.0, "overhead": None, "saves": 1, "step_s": 0.01},
        ],
        "gaps": [{"at_s": 2.0, "seconds": 1.2}],
        "decisions": [decision],
    }
    record = {"step": 250, "cut": 240, "committed": 160, "cuts": 3, "commits": 2, "longest_gap": 80,
              "longest_flight": 30}  # fmt: skip
    life = papers("checkfreq").life(record)
    lives = [life | {"instant": "at a cut", "came": True, "restored": 240, "lost": 10} for _ in range(2)]
    made = {
        "every_steps": 80, "often": 4,
        "model": {"bytes": 70_000_000, "pair_rows": 1 << 19, "batch": 128, "epoch_steps": 3000},
        "machine": {"ours": 0.9, "others": 0.05, "load": 1.5},
        "overhead": {"1 %": arm() | {"chosen": decision}, "3.5 %": arm(0.03) | {"chosen": decision},
                     "fixed": arm(0.2) | {"blocks": 5}},
        "neighbour": {"adaptive": run, "static": copy.deepcopy(run) | {"every_s": 1.2}, "budget": 0.035},
        "kills": {"every_steps": 80, "lives": lives},
        "synchronous": arm(0.4) | {"every": 120, "bytes": 1, "epoch": {
            "steps": 3000, "overhead": 0.01, "lost_steps": 1499.5, "lost_most": 2999}},
        "order": order(),
    }  # fmt: skip
    made["headlines"] = papers("checkfreq_claims").headlines(made)
    return made


def order():
    whole = {"held_out": 0.5, "seed": 1, "restored": [], "trained": 100, "twice": 0, "never": 0}
    return {
        "samples": 101, "batch": 10, "steps": 10, "restarts": 1, "saved_at": [5], "pair_rows": 8,
        "sampler": "ResumableSampler", "held_out": 50, "whole": [whole],
        "shuffled": [whole | {"held_out": 0.51, "restored": [5], "twice": 9, "never": 9}],
        "resumed": whole | {"restored": [5], "losses_equal": True, "samples_equal": True},
    }  # fmt: skip


def test_what_holds_passes(papers, found):
    assert papers("checkfreq_claims").check(json.loads(json.dumps(found))) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f["kills"]["lives"][0].update(restored=80), "step 160 was known durable"),
        (lambda f: f["kills"]["lives"][1].update(restored=251), "250 was the last one"),
        (lambda f: f["kills"]["lives"][0].update(lost=111), "111 steps were lost, with an interval of 80 and 30"),
        (lambda f: f["kills"]["lives"][0].update(commits=0), "only 0 saves"),
        (lambda f: f["order"]["resumed"].update(losses_equal=False), "losses of a resumed pass differ"),
        (lambda f: f["order"]["resumed"].update(samples_equal=False), "other samples"),
        (lambda f: f["order"]["resumed"].update(twice=1), "resumed pass: 1 samples twice"),
        (lambda f: f["order"]["resumed"].update(restored=[4]), "restarts came back to steps [4]"),
        (lambda f: f["order"]["shuffled"][0].update(never=0), "saw every sample once"),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_said(papers, found, change, said):
    change(found)
    assert any(said in sentence for sentence in papers("checkfreq_claims").check(found))


def test_a_promise_counts_what_was_under_way(papers):
    """The interval that had begun and the save in flight, as they stood when it died."""
    record = {"step": 500, "cut": 300, "committed": 100, "cuts": 2, "commits": 1, "longest_gap": 80,
              "longest_flight": 30}  # fmt: skip
    life = papers("checkfreq").life(record)
    assert (life["interval"], life["flight"], life["promise"]) == (200, 200, 400)
    assert papers("checkfreq").life(record | {"commits": 2})["flight"] == 30
