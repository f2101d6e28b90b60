"""`deltashard reclaim` removes the runs of an ended workload and no other runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.listing import REMOVAL, Hint
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_cli.kubectl import store_job
from deltashard_operator.controller import reclaim_job
from deltashard_operator.run.observed_object import Workload
from deltashard_operator.run.watched_run import WatchedRun

from tests.support.checkpoint.written_run import WrittenRun
from tests.support.command_line import Cli
from tests.support.operator import sample
from tests.support.tool import ROOT

RUN, MINE = "team/train", "uid-of-mine"


def reclaim(cli: Cli, url: str, *more: object) -> Any:
    code, text = cli("reclaim", url, "--run", RUN, "--workload", MINE, "--json", *more)
    assert code == 0, text
    return json.loads(text)


def make_run(
    url: str, directory: Path, run: str = RUN, *, workload: str = MINE, pins: tuple[str, ...] = ()
) -> None:
    directory.mkdir(parents=True)
    written = WrittenRun(open_store(url), run, directory, workload=workload)
    first = written.save(step=100, pins=pins)
    written.save(written.train(), step=200, covers=first)


def remaining(url: str, run: str) -> int:
    return sum(1 for _ in open_store(url).list(f"{run}/"))


def test_reclaim_removes_workload_runs(cli: Cli, url: str, tmp_path: Path) -> None:
    """The runs of the workload's numbered pods are removed. Other runs with the same prefix remain."""
    for n, run in enumerate((RUN, f"{RUN}-0", f"{RUN}-11", f"{RUN}-1-2", f"{RUN}-worker-0")):
        make_run(url, tmp_path / str(n), run)
    for n, run in enumerate((f"{RUN}-b", f"{RUN}2", "team/a"), start=10):
        make_run(url, tmp_path / str(n), run)
    make_run(url, tmp_path / "x", f"{RUN}-3", workload="uid-of-another")
    summary_file = tmp_path / "summary.json"
    found = reclaim(cli, url, "--result-file", summary_file)
    assert sorted(found["removed"]) == sorted([RUN, f"{RUN}-0", f"{RUN}-11", f"{RUN}-1-2", f"{RUN}-worker-0"])
    assert found["kept"] == [], "runs of other workloads with similar names are not listed"
    summary = {"runs": 5, "retained": 0, "objects": found["objects"], "bytes": found["bytes"], "kept": []}
    assert json.loads(summary_file.read_text()) == summary
    for run in found["removed"]:
        assert remaining(url, run) == 0
    for run in (f"{RUN}-b", f"{RUN}2", "team/a", f"{RUN}-3"):
        assert remaining(url, run) > 0
        assert cli("verify", url, "--run", run)[0] == 0
    assert reclaim(cli, url)["removed"] == [], "a second reclaim removes nothing"


def _opened(cli: Cli, url: str) -> None:
    """Open the run with a trainer outside the cluster that has not committed yet."""
    open_attempt(RunLog(open_store(url), RUN), owner="laptop", takeover=True)


def _rewound(cli: Cli, url: str) -> None:
    assert cli("rewind", url, "--run", RUN, "-c", "step:100", "--ended")[0] == 0


def _damaged(cli: Cli, url: str) -> None:
    log = RunLog(open_store(url), RUN)
    folds = [info.key for info in log.store.list(f"{RUN}/log/fold-")]
    log.store.delete([log.key(entry_key(1)), *folds])


@pytest.mark.parametrize(
    ("made", "then", "why"),
    [
        ({"workload": ""}, None, "another trainer opened it"),
        ({"pins": ("best",)}, None, "it has a pin, 'best'"),
        ({}, _opened, "another trainer opened it since"),
        ({}, _rewound, "opened it since"),
        ({}, _damaged, "its log is damaged"),
    ],
)
def test_reclaim_keeps_run(cli: Cli, file_url: str, tmp_path: Path, made: Any, then: Any, why: str) -> None:
    make_run(file_url, tmp_path / "w", **made)
    if then is not None:
        then(cli, file_url)
    before = remaining(file_url, RUN)
    found = reclaim(cli, file_url)
    assert found["removed"] == []
    assert why in found["kept"][0]["why"]
    assert remaining(file_url, RUN) == before
    code, text = cli("reclaim", file_url, "--run", RUN, "--workload", MINE)
    assert code == 0
    assert "is kept" in text
    assert "nothing was removed" in text


def test_run_resumed_by_another_workload_is_kept(cli: Cli, file_url: str, tmp_path: Path) -> None:
    make_run(file_url, tmp_path / "w", f"{RUN}-0")
    log = RunLog(open_store(file_url), f"{RUN}-0")
    open_attempt(log, owner="tests", workload="uid-of-another")
    summary_file = tmp_path / "summary.json"
    found = reclaim(cli, file_url, "--result-file", summary_file)
    assert [each["run"] for each in found["kept"]] == [f"{RUN}-0"]
    assert "uid-of-another opened it since" in found["kept"][0]["why"]
    assert json.loads(summary_file.read_text())["retained"] == 1


def test_reclaim_job_command_on_claim(cli: Cli, tmp_path: Path) -> None:
    """The Jobs of kubectl and of the controller run with the claim's directory in place of its mount."""
    claim = {"name": "deltashard-store", "persistentVolumeClaim": {"claimName": "checkpoints"}}
    url = "file:///mnt/shared/training"
    workload = Workload(namespace="team", kind="Job", name="train", uid=MINE)
    document = yaml.safe_load((ROOT / "tests/golden/pods/claim.out.yaml").read_text())
    rewind = store_job.manifest(
        {"metadata": {"name": "train", "namespace": "team"}, "spec": {"runId": "other"}},
        document["spec"]["template"]["spec"],
        ["rewind", "--checkpoint", "step:100", "--ended"],
        name="rewind",
    )
    policy = sample.policy({"store": {"url": url, "claim": "checkpoints"}})
    reclaim = reclaim_job.manifest(WatchedRun(workload=workload), policy)
    for run in "other", f"train-{MINE}":
        make_run(url.replace("/mnt/shared", str(tmp_path)), tmp_path / "w" / run, f"team/{run}")
    for job, message in (rewind, "step 100"), (reclaim, f'"team/train-{MINE}"'):
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert claim in pod["volumes"]
        assert {"name": "deltashard-store", "mountPath": "/mnt/shared"} in container["volumeMounts"]
        assert not [each for each in container["env"] if each["name"].startswith(("AWS_", "HTTPS_", "SSL_"))]
        arguments = [
            argument.replace("$(DELTASHARD_URL)", url)
            .replace("/mnt/shared", str(tmp_path))
            .replace("/dev/termination-log", str(tmp_path / "termination-log"))
            for argument in [*container["command"][1:], *container.get("args", ())]
        ]
        code, text = cli(*arguments)
        assert code == 0, text
        assert message in text
    assert remaining(f"file://{tmp_path}/training", f"team/train-{MINE}") == 0


def test_empty_workload_is_refused(cli: Cli, file_url: str, tmp_path: Path) -> None:
    """The run has no workload, and the option may come from an empty variable."""
    make_run(file_url, tmp_path / "w", workload="")
    code, text = cli("reclaim", file_url, "--run", RUN, "--workload", "")
    assert code == 2
    assert "--workload is empty" in text
    assert remaining(file_url, RUN) > 0


def test_termination_message_fits_kubelet_limit(cli: Cli, file_url: str, tmp_path: Path) -> None:
    """The kubelet keeps 4,096 bytes of the message, and truncated JSON is unreadable."""
    for n in range(20):
        make_run(file_url, tmp_path / str(n), f"{RUN}-{n}", pins=(f"{'ä' * 200}{n}",))
    summary_file = tmp_path / "summary.json"
    assert len(reclaim(cli, file_url, "--result-file", summary_file)["kept"]) == 20
    assert len(summary_file.read_bytes()) < 4096
    summary = json.loads(summary_file.read_text())
    assert summary["retained"] == 20
    assert 1 <= len(summary["kept"]) < 20


@pytest.mark.parametrize("hint", [True, False])
def test_run_opened_during_reclaim_is_kept(
    cli: Cli, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hint: bool
) -> None:
    """The trainer opens the run between the check and the first deletion."""
    make_run(file_url, tmp_path / "w")
    barrier = RunLog.put_hint

    def opened_before(self: RunLog, hint_kind: Hint) -> None:
        if hint_kind == REMOVAL:
            monkeypatch.setattr(RunLog, "put_hint", barrier)
            open_attempt(RunLog(open_store(file_url), RUN), owner="tests", workload="uid-of-another")
            if not hint:
                self.store.delete([self.key("log/HINT")])
        barrier(self, hint_kind)

    monkeypatch.setattr(RunLog, "put_hint", opened_before)
    assert "the run is in use" in reclaim(cli, file_url)["kept"][0]["why"]
    assert cli("verify", file_url, "--run", RUN, "--deep")[0] == 0
    assert "uid-of-another opened it since" in reclaim(cli, file_url)["kept"][0]["why"]
