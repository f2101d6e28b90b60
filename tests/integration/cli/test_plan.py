"""`deltashard plan`: from sizes, from a trace, and from the log of a real run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.deciding.cost import KEY, Measure, Profile
from deltashard_checkpoint.deciding.evidence import Evidence, rates
from deltashard_checkpoint.deciding.interval import Basis, fewest_saves
from deltashard_checkpoint.deciding.record import Held, Record
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write.attempt import open_attempt

from tests.support.checkpoint.written_run import HALF, ITEMS, WrittenRun
from tests.support.command_line import Cli

RUN = "team/run-1"
COUNTED = Evidence(exposure_s=360_000, lossy=2.5, restores=4)
"""By the run's own decider."""
SIZED = ("plan", "--bytes", "400GiB", "--pods", "16", "--ranks", "128", "--mtbf", "20h")


PRICES = ("gb-month", "put", "get", "hour")


def answer(cli: Cli, *arguments: object) -> Any:
    code, text = cli(*arguments, "--json")
    assert code == 0, text
    return json.loads(text)


def profile(held_s: float | None = None, *, applied: bool = True) -> str:
    def measured(value: float) -> Measure:
        return Measure().sampled(value).sampled(value)

    found = Profile(key="k", step_s=0.01, save=measured(0.04), stall=measured(0.01), durable=measured(0.5))
    held = (
        None
        if held_s is None
        else Held(basis=Basis(seconds=held_s, cost_s=0.04, mtbf_s=1e5), goal="auto 0 inf")
    )
    return Record(profile=found, held=held, applied=applied, evidence=COUNTED).text()


@pytest.fixture
def written(tmp_path: Path) -> str:
    """A run of two attempts, three checkpoints in a chain and one after a failure, with a profile. Its store's URL."""
    return write(tmp_path)


def write(tmp_path: Path, held_s: float | None = None, *, applied: bool = True) -> str:
    url = f"file://{tmp_path}/store"
    run = WrittenRun(open_store(url), RUN, tmp_path)
    first = run.save(step=100)
    second = run.save(run.train(), step=200, covers=first, encoding="q8")
    third = run.save(run.train(), step=300, covers=second, encoding="q8")
    run.attempt = open_attempt(RunLog(run.store, RUN), owner="tests", which=f"seq:{third}").attempt
    run.cut = 0
    run.save(
        run.train(), step=400, covers=third, encoding="q8", metadata={KEY: profile(held_s, applied=applied)}
    )
    run.close()
    return url


def test_the_example_of_the_help(cli: Cli) -> None:
    found = answer(cli, *SIZED, "--hours", 168, "--stall", "100ms", "--slowdown", "900ms")
    plan = found["plan"]
    assert plan["cost_s"] == pytest.approx(1.0)
    assert plan["chosen"]["interval_s"] == pytest.approx(min(1800, fewest_saves(1.0, 72000)))
    assert plan["encoding"] == "q8"
    assert [each["name"] for each in plan["goals"]] == [
        "auto", "overhead 1 %", "lost work", "Check-N-Run", "Young/Daly",
    ]  # fmt: skip
    assert {each["source"] for each in found["assumptions"]} >= {"said"}
    assert found["run"] is found["now"] is None
    code, text = cli(*SIZED)
    assert code == 0
    for shown in (
        "auto: save every",
        "q8",
        "Goals side by side",
        "Check-N-Run",
        "assumed: say --bandwidth",
        "@ auto",
    ):
        assert shown in text
    assert text.isascii()
    assert "--trace" in cli("plan", "--help")[1]


def test_training_that_does_not_get_on_is_said_in_words(cli: Cli) -> None:
    code, text = cli("plan", "--bytes", "100GiB", "--mtbf", "1s")
    assert code == 0
    assert "training does not get on" in text
    assert "no interval keeps up with these failures" in text
    assert "604,800 restores expected, with 95 % over 100,000" in text
    assert "100000" not in text
    for nonsense in ("inf", "e+", "nan"):
        assert nonsense not in text.replace("inferred", "")
    assert "over 1,000 %" in text


def test_dense_parameters_come_on_top_of_the_bytes_of_tables(cli: Cli) -> None:
    """More of them than of tables, too: 10 GB were taken for a single row."""
    sized = ("plan", "--bytes", "10GB", "--mtbf", "20h")
    tables, both = answer(cli, *sized), answer(cli, *sized, "--dense", "20GB")
    assert tables["plan"]["raw_bytes"] == pytest.approx(10e9)
    assert both["plan"]["raw_bytes"] == pytest.approx(30e9)
    assert both["plan"]["stored_bytes"] == pytest.approx(tables["plan"]["stored_bytes"] + 20e9)
    rows = [
        next(each["value"] for each in found["assumptions"] if each["name"] == "model")
        for found in (tables, both)
    ]
    assert rows == ["38,461,538 rows of 64 float32 and 4 B of optimizer state"] * 2


def test_a_trace(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "failures.csv"
    trace.write_text(
        "start,end,cause\n" + "".join(f"{at * 36000},{at * 36000 + 600},oom\n" for at in range(100))
    )
    found = answer(cli, "plan", "--model", "1e8x32x4", "--pods", 8, "--trace", trace)
    assert found["plan"]["mtbf_s"] == pytest.approx(35400, rel=0.1)
    restart = next(each for each in found["assumptions"] if each["name"].startswith("restart"))
    assert restart["value"] == "10 min"
    trace.write_text("start\n5\nlater\n")
    code, text = cli("plan", "--bytes", "1GiB", "--trace", trace)
    assert code == 2
    assert "failures.csv, line 3" in text
    assert "'later'" in text


def test_a_real_run_says_what_it_is_and_what_would_change(cli: Cli, written: str) -> None:
    found = answer(cli, "plan", written, "--run", RUN)
    run = found["run"]
    assert run["rows"] == ITEMS.rows + HALF.rows
    assert (run["checkpoints"], run["attempts"], run["encoding"]) == (4, 2, "q8")
    assert [share for _, share in run["touched"]] == pytest.approx([0.086] * 3, abs=0.02)
    assert run["evidence"] == asdict(COUNTED)
    assert found["plan"]["mtbf_s"] == pytest.approx(rates(COUNTED, pods=1).mtbf_s)
    assert found["plan"]["cost_s"] == pytest.approx(0.04)
    assert found["now"]["interval_s"] == pytest.approx(run["interval_s"])
    assert found["now"]["overhead"] > found["plan"]["chosen"]["overhead"]
    code, text = cli("plan", written)
    assert code == 0
    assert "Its last saves were" in text
    assert "n now" in text
    assert answer(cli, "plan", written, "--stall", "9s", "--slowdown", "0s")["plan"][
        "cost_s"
    ] == pytest.approx(9)


def test_a_run_that_has_chosen_saves_as_its_newest_commit_says(cli: Cli, tmp_path: Path) -> None:
    url = write(tmp_path, held_s=1140.0)
    assert answer(cli, "plan", url)["now"]["interval_s"] == 1140
    code, text = cli("plan", url)
    assert code == 0
    assert "Its newest commit says: every 19 min (its last saves were" in text


def test_an_interval_that_is_only_advised_is_not_what_a_run_does(cli: Cli, tmp_path: Path) -> None:
    url = write(tmp_path, held_s=1140.0, applied=False)
    found = answer(cli, "plan", url)
    assert found["now"]["interval_s"] == pytest.approx(found["run"]["recent_s"])
    assert "Its newest commit says" not in cli("plan", url)[1]


def test_a_run_without_checkpoints_and_no_run(cli: Cli, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    open_attempt(RunLog(open_store(url), "young"), owner="tests")
    code, text = cli("plan", url)
    assert code == 2
    assert "no checkpoint yet" in text
    assert cli("plan", url, "--run", "none")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "how large"),
        (("--bytes", "lots"), "no size"),
        (("--bytes", "1GiB", "--model", "5x5x5"), "same thing"),
        (("--bytes", "1GiB", "--mtbf", "0s"), "--mtbf is 0"),
        (("--bytes", "1GiB", "--mtbf", "1h", "--failures-per-day", "2"), "same thing"),
        (("--bytes", "1GiB", "--trace-span", "1d"), "--trace, which is missing"),
        (("--run", "x"), "which is missing"),
        (("--bytes", "1GiB", "--pods", "4", "--ranks", "1"), "a pod has one rank at least"),
        (("--bytes", "1GiB", "--goal", "fixed"), "nothing to choose"),
        (("--bytes", "1GiB", "--goal", "soon"), "the goal is"),
        (("--bytes", "1GiB", "--dirty", "0%"), "no share"),
        (("--bytes", "1GiB", "--dirty", "26%@30m", "--dirty", "20%@60m"), "20% of rows within 60 min"),
        *((("--bytes", "1GiB", f"--price-{of}=-1"), "not in the range") for of in PRICES),
        *((("--bytes", "1GiB", f"--price-{of}=nan"), "no finite number") for of in PRICES),
        (("--bytes", "1GiB", "--trace", "/does/not/exist"), "No such file"),
    ],
)
def test_usage(cli: Cli, arguments: tuple[str, ...], what: str) -> None:
    code, text = cli("plan", *arguments)
    assert code == 2
    assert what in text
