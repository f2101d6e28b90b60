"""`deltashard plan` from sizes and from the log of a real run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from deltashard_checkpoint.deciding.cost import KEY, Measure, Profile
from deltashard_checkpoint.deciding.evidence import Evidence, rates
from deltashard_checkpoint.deciding.interval import fewest_saves
from deltashard_checkpoint.deciding.record import Record
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write.attempt import open_attempt

from tests.support.checkpoint.written_run import WrittenRun
from tests.support.command_line import Cli, json_output

RUN = "team/run-1"
COUNTED = Evidence(exposure_s=360_000, lossy=2.5, restores=4)
"""Counted by the run's own decider."""
SIZED = ("plan", "--bytes", "400GiB", "--pods", "16", "--mtbf", "20h")


def profile() -> str:
    def measured(value: float) -> Measure:
        return Measure().with_sample(value).with_sample(value)

    found = Profile(key="k", step_s=0.01, save=measured(0.04), stall=measured(0.01), durable=measured(0.5))
    return Record(profile=found, evidence=COUNTED).text()


@pytest.fixture
def written(tmp_path: Path) -> str:
    """Return the URL of a store with a run.

    The run has two attempts, three checkpoints in a chain, one after a failure, and a profile.
    """
    url = f"file://{tmp_path}/store"
    run = WrittenRun(open_store(url), RUN, tmp_path)
    first = run.save(step=100)
    second = run.save(run.train(), step=200, covers=first, encoding="q8")
    third = run.save(run.train(), step=300, covers=second, encoding="q8")
    run.attempt = open_attempt(RunLog(run.store, RUN), owner="tests", which=f"seq:{third}").attempt
    run.snapshot_id = 0
    run.save(run.train(), step=400, covers=third, encoding="q8", metadata={KEY: profile()})
    run.close()
    return url


def test_help_example(cli: Cli) -> None:
    found = json_output(cli, *SIZED, "--hours", 168, "--save-cost", "1s")["plan"]
    assert found["save_s"] == 1.0
    assert found["interval_s"] == pytest.approx(min(1800, fewest_saves(1.0, 72000)))
    assert found["overhead"] == pytest.approx(1.0 / found["interval_s"] + found["interval_s"] / 144000)
    assert found["encoding"] == "q8"
    assert found["stored_bytes"] == pytest.approx(400 * 2**30 * 76 / 260), (
        "8 bit, scale and offset, and the state"
    )
    assert found["durable_s"] == pytest.approx(found["stored_bytes"] / 400e6 / 16)
    assert found["now_s"] is found["overhead_now"] is None
    code, text = cli(*SIZED)
    assert code == 0
    for shown in (
        "auto: save every",
        "q8",
        "assumed: 400 MB/s a pod; --bandwidth sets it",
        "all full",
    ):
        assert shown in text
    assert text.isascii()
    assert "--mtbf 20h" in cli("plan", "--help")[1]


def test_plan_of_real_run(cli: Cli, written: str) -> None:
    found = json_output(cli, "plan", written, "--run", RUN)
    run, plan = found["run"], found["plan"]
    assert run["checkpoints"] == 4
    assert run["evidence"] == asdict(COUNTED)
    assert plan["mtbf_s"] == pytest.approx(rates(COUNTED, pods=1).mtbf_s)
    assert (plan["save_s"], plan["durable_s"]) == (pytest.approx(0.04), pytest.approx(0.5))
    assert plan["stored_bytes"] == pytest.approx(run["stored_bytes"])
    assert plan["now_s"] == pytest.approx(run["now_s"])
    assert plan["overhead_now"] > plan["overhead"]
    code, text = cli("plan", written)
    assert code == 0
    assert "Now its last saves were" in text
    assert json_output(cli, "plan", written, "--save-cost", "9s")["plan"]["save_s"] == pytest.approx(9)


def test_plan_without_checkpoints_or_run(cli: Cli, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    open_attempt(RunLog(open_store(url), "young"), owner="tests")
    code, text = cli("plan", url)
    assert code == 2
    assert "no checkpoint yet" in text
    assert cli("plan", url, "--run", "none")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "the size of the model is unknown"),
        (("--bytes", "lots"), "is not a size"),
        (("--bytes", "0B"), "must be greater than 0"),
        (("--bytes", "1GiB", "file:///there"), "both give the size"),
        (("--bytes", "1GiB", "--mtbf", "0s"), "must be greater than 0"),
        (("--bytes", "1GiB", "--mtbf", "often"), "is not a duration"),
        (("--run", "x"), "needs the URL"),
        (("--bytes", "1GiB", "--hours", "nan"), "not a finite number"),
    ],
)
def test_usage(cli: Cli, arguments: tuple[str, ...], what: str) -> None:
    code, text = cli("plan", *arguments)
    assert code == 2
    assert what in text
