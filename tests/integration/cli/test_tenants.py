"""Two namespaces in one bucket of a real MinIO, with the keys that the page on tenants documents."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write.closing import mark_closing, wait_for_closing
from minio.error import S3Error
from torch import nn

from tests.support.command_line import Cli
from tests.support.server.minio_server import ROOT, MinioServer
from tests.support.server.minio_user import keys_of

PAGE = (ROOT / "docs" / "kubernetes" / "tenants.md").read_text(encoding="utf-8")
STEPS = 6
pytestmark = pytest.mark.minio


def page_policy(bucket: str, namespace: str) -> dict[str, Any]:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert text.count("team-a") == 2
    assert text.count("arn:aws:s3:::checkpoints") == 2
    found = text.replace("arn:aws:s3:::checkpoints", f"arn:aws:s3:::{bucket}").replace("team-a", namespace)
    document = json.loads(found)
    assert isinstance(document, dict)
    return document


@dataclass
class Team:
    """A namespace with its keys, and training with these keys."""

    name: str
    url: str
    keys: dict[str, str]
    monkeypatch: pytest.MonkeyPatch

    @property
    def run(self) -> str:
        return f"{self.name}/exp"

    def set_credentials(self) -> None:
        for name, value in self.keys.items():
            self.monkeypatch.setenv(name, value)

    def train(self, until: int) -> tuple[int, list[torch.Tensor]]:
        """Train with a real sidecar and return (the resumed step, the weights at the end)."""
        self.set_credentials()
        torch.manual_seed(0)
        model = nn.EmbeddingBag(200, 8, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with deltashard.Checkpointer(
            model, optimizer, url=self.url, run=self.run, every_steps=2, arena_bytes=64 << 20, encoding="fp32"
        ) as ckpt:
            resumed = ckpt.restore()
            step = began = resumed.step if resumed else 0
            while step < until:
                optimizer.zero_grad()
                model(torch.tensor([[step, step + 1]])).sum().backward()
                optimizer.step()
                step += 1
                ckpt.step()
        return began, [each.detach().clone() for each in model.parameters()]


@pytest.fixture
def teams(minio_server: MinioServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Team, Team]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    bucket = minio_server.new_bucket()
    url = minio_server.url(bucket, "training")
    first, second = (
        Team(name, url, keys_of(minio_server, page_policy(bucket, name)), monkeypatch)
        for name in ("team-a", "team-b")
    )
    return first, second


def test_documented_keys_cover_own_runs_only(
    teams: tuple[Team, Team], minio_server: MinioServer, cli: Cli, tmp_path: Path
) -> None:
    """Save, restore, list, verify, gc and export work on the namespace's runs.

    Errors for other runs name the keys' source.
    """
    mine, other = teams
    other.train(STEPS)
    began, weights = mine.train(STEPS)
    assert began == 0
    began, again = mine.train(STEPS)
    assert began == STEPS, "the second training restores"
    assert all(map(torch.equal, weights, again))

    def stored() -> list[tuple[str, str]]:
        bucket = mine.url.removeprefix("s3://").partition("/")[0]
        found = minio_server.client().list_objects(bucket, "training/team-b/", recursive=True)
        return [(str(each.object_name), str(each.etag)) for each in found]

    before = stored()
    assert before
    mine.set_credentials()

    def run_url(team: Team) -> str:
        base, _, query = team.url.partition("?")
        return f"{base}/{team.run}?{query}"

    commands: list[tuple[object, ...]] = [
        ("ls", "{}"),
        ("inspect", "{}"),
        ("verify", "{}"),
        ("scan", "{}"),
        ("restore", "{}", tmp_path / "{}"),
        ("gc", "{}", "--keep-last", 1, "--grace", 0),
        ("compact", "{}"),
        ("verify", "{}"),
    ]
    for number, (command, _, *rest) in enumerate(commands):
        arguments = [str(each).format(number) for each in rest]
        code, text = cli(command, run_url(mine), *arguments)
        assert code == 0, (command, text)
        code, text = cli(
            command, run_url(other), *[f"{each}-b" if "/" in each else each for each in arguments]
        )
        assert code == 2, (command, text)
        assert "AccessDenied" in text, (command, text)
        assert "credentials come from" in text, (command, text)
        assert "the policy of the bucket" in text, (command, text)
    assert stored() == before

    # Training on the other namespace's run fails with an error and writes nothing.
    intruder = Team("team-b", mine.url, mine.keys, mine.monkeypatch)
    with pytest.raises(deltashard.DeltashardError, match=r"(?s)AccessDenied.*policy of the bucket"):
        intruder.train(STEPS + 2)
    assert stored() == before
    began, _ = other.train(STEPS)
    assert began == STEPS


def test_marker_age_needs_no_bucket_rights(
    teams: tuple[Team, Team],
) -> None:
    """The store's clock is also read from a denied response. Otherwise no pod could follow an evicted one."""
    mine, _ = teams
    mine.set_credentials()
    with open_store(mine.url) as store:
        log = RunLog(store, mine.run)
        mark_closing(log, 1, "gone")
        wait_for_closing(log, bound_s=0.5)
        assert abs(store.now_s() - time.time()) < 600


def test_bucket_root_is_not_listable(teams: tuple[Team, Team], minio_server: MinioServer) -> None:
    """A plain client cannot list the root, another prefix, or a prefix that merely starts with the namespace's name."""
    mine, _ = teams
    bucket, _, _ = mine.url.removeprefix("s3://").partition("/")
    client = type(minio_server.client())(
        f"{minio_server.host}:{minio_server.port}",
        mine.keys["AWS_ACCESS_KEY_ID"],
        mine.keys["AWS_SECRET_ACCESS_KEY"],
        secure=False,
        region="us-east-1",
    )
    assert list(client.list_objects(bucket, "training/team-a/", recursive=True)) == []
    for prefix in ("", "training/", "training/team-a", "training/team-a-too/", "training/team-b/"):
        with pytest.raises(S3Error, match="AccessDenied"):
            list(client.list_objects(bucket, prefix, recursive=True))
    client._http.clear()
