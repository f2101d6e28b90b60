"""A real sidecar and a controller's server: reports over its lifetime, directives, and no blocking."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.policy import KEY

from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import Trainer
from tests.support.server.fleet_server import FleetServer
from tests.support.sidecar.training import pod, training
from tests.support.sidecar_process import sidecar

DEADLINE_S = 60.0


def flags(tmp_path: Path, server: FleetServer, **more: object) -> dict[str, Any]:
    return {
        **server.flags(tmp_path), **pod(), "pod-name": "pod", "pod-namespace": "ns", "pod-uid": "p-1",
        "workload-kind": "Job", "workload-name": "job", **more,
    }  # fmt: skip


def wait_for_report(server: FleetServer, what: str, **expected: object) -> fleet.ReportRequest:
    eventually(
        lambda: all(getattr(server.last.pod, name) == value for name, value in expected.items()),
        what=f"{what}, last report: {server.last}",
    )
    return server.last


def wait_for_incident(server: FleetServer, kind: fleet.IncidentKind) -> fleet.Incident:
    eventually(lambda: server.incidents(kind), what=str(kind))
    (one,) = server.incidents(kind)
    return one


def over(server: FleetServer, name: str) -> fleet.SaveResult:
    ends = lambda: {each.id: each for report in list(server.reports) for each in report.save_results}  # noqa: E731
    eventually(lambda: name in ends(), what=f"the result of {name}")
    return ends()[name]


def fail_a_save(trainer: Trainer) -> None:
    snapshot = trainer.begin()
    snapshot.outbox.put(pb.SaveRequest(abort=pb.SaveRequest.Abort(cause="veto")))
    eventually(snapshot.over.is_set, what="aborted")
    snapshot.outbox.put(None)


def newest(url: str, run: str = "ns/job") -> Checkpoint:
    found = RunLog(open_store(url), run).refresh().newest()
    assert found is not None
    return found


def stored_as(entry: Checkpoint) -> set[str]:
    return {name for names in entry.encodings.values() for name in names}


def test_pod_lifecycle_is_reported(tmp_path: Path, url: str, server: FleetServer) -> None:
    """The phases are waiting, training, a commit, a killed trainer, a restore, a failed save, and an orderly close."""
    with sidecar(tmp_path, url, **flags(tmp_path, server)) as process:
        first = wait_for_report(server, "waiting", phase=fleet.PHASE_WAITING)
        assert (first.pod.run, first.pod.attempt, first.pod.store_ok) == ("ns/job", 0, True)
        assert (first.identity.workload_uid, first.HasField("run")) == ("w-1", False)
        trainer = Trainer(process.socket, FakeModel())
        wait_for_report(server, "attached", phase=fleet.PHASE_RESTORING)
        trainer.open()
        trainer.model.step = 5
        trainer.report_step()
        wait_for_report(server, "training", phase=fleet.PHASE_TRAINING, attempt=1)
        commit = trainer.save_and_commit()
        eventually(lambda: server.last.run.newest.seq == commit.seq, what="the commit")
        run, rank = server.last.run, server.last.pod.ranks[0]
        assert (run.newest.step, run.checkpoint_count, rank.rank, rank.world_size) == (5, 1, 0, 1)
        assert run.stored_bytes == commit.stored_bytes > 0
        kept = run.checkpoints[0]
        assert (kept.seq, kept.step, kept.bytes) == (commit.seq, 5, commit.stored_bytes)
        assert 0 < run.newest_age_s == kept.age_s < DEADLINE_S
        # The trainer is killed (its lock ends with its descriptors), and another replaces it.
        trainer.model.step = 7
        trainer.report_step()
        trainer.close()
        again = Trainer(process.socket, FakeModel())
        opened = again.open()
        again.restore(opened.resume_seq)
        wait_for_incident(server, fleet.INCIDENT_KIND_TRAINER_LOST)
        restored = wait_for_incident(server, fleet.INCIDENT_KIND_RESTORED)
        assert (restored.step, restored.lost_steps, restored.cause) == (5, 2, "cache")
        assert restored.attempt == opened.attempt
        assert "2 steps were lost" in restored.message
        wait_for_report(server, "restored", phase=fleet.PHASE_TRAINING)
        fail_a_save(again)
        assert wait_for_incident(server, fleet.INCIDENT_KIND_SAVE_FAILED).cause == "aborted"
        assert wait_for_report(server, "the failure", consecutive_save_failures=1)
        again.model.step = 8
        again.report_step()
        again.save_and_commit()
        wait_for_report(server, "the counter is reset", consecutive_save_failures=0)
        again.detach()
        wait_for_report(server, "closed", phase=fleet.PHASE_CLOSED)
        again.close()
        assert process.terminate() == 0
    assert wait_for_report(server, "the last report", phase=fleet.PHASE_CLOSED).run.newest.step == 8


def test_directive_takes_effect_while_running(tmp_path: Path, url: str, server: FleetServer) -> None:
    """It affects the timer, the next snapshot's encodings, the trainer's notice, the report and the commit's metadata.

    An invalid directive has no effect.
    """
    with training(tmp_path, url, **flags(tmp_path, server)) as (_, trainer):
        line = trainer.arena.line(0)
        assert line[SAVE_AT_STEP] == NEVER
        first = trainer.begin()
        assert (first.begun.encoding, first.begun.state_encoding) == ("fp32", "fp32")
        wait_for_report(server, "connected", attempt=1)
        policy = pb.Policy(every_steps=40, encoding="q4", differential="full", state_encoding="bf16")
        server.set_reply(directive=fleet.Directive(id=2, policy=policy))
        wait_for_report(server, "the directive is in force", directive=2)
        # The snapshot in progress keeps its settings.
        first.write_all()
        first.seal()
        trainer.committed(first.number)
        assert stored_as(newest(url)) == {"fp32"}
        assert KEY not in newest(url).metadata
        eventually(lambda: line[SAVE_AT_STEP] == 40, what="the timer follows")
        assert [p.encoding for p in trainer.policies] == ["q4"]
        assert server.last.run.policy.every_steps == 40
        server.set_reply(directive=fleet.Directive(id=9, policy=pb.Policy(encoding="nonsense")))
        reports = len(server.reports)
        eventually(lambda: len(server.reports) > reports + 1, what="replies with the invalid directive")
        snapshot = trainer.begin()
        assert (snapshot.begun.encoding, snapshot.begun.state_encoding) == ("q4", "bf16")
        assert not snapshot.begun.HasField("covers"), "full: every snapshot is a baseline"
        snapshot.write_all()
        snapshot.seal()
        trainer.committed(snapshot.number)
        entry = newest(url)
        assert "q4" in stored_as(entry)
        assert "full" in entry.directive
        recorded = json.loads(entry.metadata[KEY])
        assert (recorded["id"], recorded["workload"]) == (2, "w-1")
        assert recorded["policy"] == {
            "every_steps": 40, "encoding": "q4", "differential": "full", "state_encoding": "bf16"
        }  # fmt: skip


def test_restart_without_controller_keeps_directive(tmp_path: Path, url: str, server: FleetServer) -> None:
    """The workload's pods adopt it from the newest commit at Open or re-attach. Other workloads' pods do not."""
    with training(tmp_path, url, **flags(tmp_path, server)) as (_, trainer):
        wait_for_report(server, "connected", attempt=1)
        server.set_reply(directive=fleet.Directive(id=4, policy=pb.Policy(every_steps=25, encoding="q8")))
        wait_for_report(server, "the directive is in force", directive=4)
        trainer.save_and_commit()
    alone = flags(tmp_path, server) | {"fleet": ""}
    with sidecar(tmp_path, url, **alone) as process:
        trainer = Trainer(process.socket, FakeModel())
        assert trainer.reply.policy.encoding == "fp32"
        trainer.open()
        eventually(lambda: trainer.policies, what="the notice of the directive")
        eventually(lambda: trainer.arena.line(0)[SAVE_AT_STEP] == 25, what="the timer follows")
        assert trainer.begin().begun.encoding == "q8"
        attempt = trainer.attempt
        trainer.close()
    with sidecar(tmp_path, url, **alone) as process:
        trainer = Trainer(process.socket, FakeModel(), attempt=attempt)
        assert trainer.reply.policy.encoding == "q8"
        trainer.close()
    with sidecar(tmp_path, url, **(alone | {"workload-uid": "w-2"})) as process:
        other = Trainer(process.socket, FakeModel())
        other.open()
        assert other.begin().begun.encoding == "fp32"
        other.close()


def test_ordered_save_is_executed_once(tmp_path: Path, url: str, server: FleetServer) -> None:
    """The next snapshot executes it with its pin. Failures and expiry are reported, and a restart repeats no order."""
    first = fleet.SaveOrder(id="u-1", reason="request", pin="release")
    with sidecar(tmp_path, url, **flags(tmp_path, server)) as process:
        server.set_reply(saves=[first, fleet.SaveOrder(id="late", reason="request", deadline_s=0.1)])
        assert over(server, "late").outcome == fleet.SaveResult.OUTCOME_EXPIRED
        trainer = Trainer(process.socket, FakeModel())
        trainer.open()  # only now is there a trainer that can save
        eventually(lambda: trainer.urgent, what="the save is requested")
        assert [(each.reason, each.urgent) for each in trainer.urgent] == [("request", False)]
        commit = trainer.save_and_commit()
        end = over(server, "u-1")
        assert (end.outcome, end.seq) == (fleet.SaveResult.OUTCOME_COMMITTED, commit.seq)
        assert newest(url).pins == ("release",)
        eventually(lambda: list(server.last.run.checkpoints[0].pins) == ["release"])
        server.set_reply(saves=[fleet.SaveOrder(id="drain/n/1", reason="drain", urgent=True, deadline_s=60)])
        eventually(lambda: len(trainer.urgent) == 2, what="the second save is requested")
        assert (trainer.urgent[1].reason, trainer.urgent[1].urgent) == ("drain", True)
        fail_a_save(trainer)
        end = over(server, "drain/n/1")
        assert (end.outcome, end.cause) == (fleet.SaveResult.OUTCOME_FAILED, "aborted: veto")
        server.set_reply(saves=[fleet.SaveOrder(id="u-2", reason="request", pin="release")])
        end = over(server, "u-2")
        assert (end.outcome, f"at step {newest(url).step}" in end.cause) == (
            fleet.SaveResult.OUTCOME_FAILED,
            True,
        )
        process.kill()
    server.reports.clear()
    with sidecar(tmp_path, url, **flags(tmp_path, server)) as process:
        server.set_reply(saves=[first])
        again = Trainer(process.socket, FakeModel(), attempt=trainer.attempt)
        assert over(server, "u-1").seq == commit.seq
        assert not again.urgent
        again.close()
    trainer.close()


def test_sidecar_without_rank_0_executes_order(tmp_path: Path, url: str, server: FleetServer) -> None:
    """Ranks save together, so any of them may request it. The designated sidecar reports for the run."""
    server.set_reply(report_run=True, saves=[fleet.SaveOrder(id="u-1", reason="request")])
    with sidecar(tmp_path, url, **flags(tmp_path, server)) as process:
        trainer = Trainer(process.socket, FakeModel(), rank=1, world_size=2, attempt=1, layout="0" * 32)
        eventually(lambda: trainer.urgent, what="the save is requested")
        eventually(lambda: server.last.HasField("run"), what="the report has the run")
        trainer.close()


def test_nudge_triggers_report(tmp_path: Path, url: str, server: FleetServer) -> None:
    """A nudge on the metrics port needs no body and no secret. The port serves nothing but metrics otherwise."""
    server.set_reply(next_s=300)
    with sidecar(tmp_path, url, metrics_port=0, metrics_host="::", **flags(tmp_path, server)) as process:
        eventually(lambda: server.reports, what="the first report")
        port = process.ready()["metrics_port"]
        for address in ("127.0.0.1", "[::1]"):
            nudge = urllib.request.Request(f"http://{address}:{port}/v1/report", method="POST")
            with urllib.request.urlopen(nudge, timeout=DEADLINE_S) as answer:
                assert (answer.status, answer.read()) == (202, b"")
        eventually(lambda: len(server.reports) == 2, what="the nudged report")
        assert "deltashard_fleet_connected 1.0" in process.metrics_page()
    assert len(server.reports) <= 3, "two nudges cause one report, and the last report follows"


def test_silent_controller_blocks_nothing(tmp_path: Path, url: str, server: FleetServer) -> None:
    """The controller accepts connections and never responds. Saves commit, and the sidecar ends in time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_flags = flags(tmp_path, server) | {"fleet": f"localhost:{silent.getsockname()[1]}"}
        no_timeout = {"deltashard_sidecar.fleet.report_client.DEADLINE_S": 86400.0}
        with sidecar(tmp_path, url, metrics_port=0, constants=no_timeout, **silent_flags) as process:
            trainer = Trainer(process.socket, FakeModel())
            trainer.open()
            silent.settimeout(DEADLINE_S)
            connection, _ = silent.accept()
            for _ in range(3):
                trainer.model.train()
                trainer.save_and_commit()
            page = process.metrics_page()
            assert re.search(r"^deltashard_fleet_connected 0.0$", page, re.MULTILINE)
            trainer.close()
            assert process.terminate() == 0
            connection.close()


def test_library_applies_directive_and_reports_fault(
    tmp_path: Path, url: str, server: FleetServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real trainers restore what the new encodings stored. A write outside of the optimizer becomes an incident."""
    table = torch.nn.EmbeddingBag(60_000, 8, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with sidecar(tmp_path, url, **flags(tmp_path, server)) as process:
        monkeypatch.setenv("DELTASHARD_SOCKET", str(process.socket))
        policies: list[str] = []

        def step(ckpt: deltashard.Checkpointer) -> None:
            optimizer.zero_grad()
            table(torch.randint(0, 60_000, (8, 4))).sum().backward()
            optimizer.step()
            ckpt.step()
            policies.append(ckpt._attachment.policy.encoding)

        with deltashard.Checkpointer(table, optimizer, content_hash=True) as ckpt:
            assert ckpt.restore() is None
            step(ckpt)
            assert ckpt.save().wait(DEADLINE_S).baseline
            server.set_reply(
                directive=fleet.Directive(id=1, policy=pb.Policy(encoding="q4", state_encoding="bf16"))
            )
            wait_for_report(server, "the directive is in force", directive=1)
            eventually(lambda: step(ckpt) or policies[-1] == "q4", what="the library applies the directive")
            commit = ckpt.save().wait(DEADLINE_S)
            assert not commit.baseline, "another encoding does not cause a baseline"
            assert stored_as(newest(url)) == {"q4"}
            table.weight.data.add_(1.0)
            step(ckpt)
            assert ckpt.save().wait(DEADLINE_S).baseline, (
                "a tracking fault makes the next save hold every row"
            )
            wait_for_incident(server, fleet.INCIDENT_KIND_TRACKING_FAULT)
            server.set_reply(saves=[fleet.SaveOrder(id="u-1", reason="request")])
            before = ckpt.stats.commits
            eventually(lambda: step(ckpt) or ckpt.stats.commits > before, what="the ordered save")
        wait_for_report(server, "closed", phase=fleet.PHASE_CLOSED)
