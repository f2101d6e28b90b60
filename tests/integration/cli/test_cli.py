"""The command line on file:// and real MinIO stores, healthy and damaged."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.format import typed_tree
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.url import open_store

from tests.support import command_line
from tests.support.checkpoint.run_builder import rehashed
from tests.support.checkpoint.snapshot import assert_same, read_checkpoint
from tests.support.checkpoint.written_run import HALF, ITEMS, WrittenRun
from tests.support.command_line import Cli, run_url
from tests.support.server.minio_server import free_port

RUN = "team/run-1"
SCRIPT = Path(sys.executable).parent / "deltashard"


json_output = partial(command_line.json_output, codes=(0, 1))


def write(url: str, directory: Path, run: str = RUN) -> WrittenRun:
    written = WrittenRun(open_store(url), run, directory)
    first = written.save(step=100, pins=("best",), metadata={"git": "abc"})
    second = written.save(written.train(), step=200, covers=first)
    written.save(written.train(), step=300, covers=second, encoding="q8")
    written.close()
    return written


@pytest.fixture
def run(url: str, tmp_path: Path) -> WrittenRun:
    return write(url, tmp_path)


@pytest.fixture
def file_run(file_url: str, tmp_path: Path) -> Iterator[WrittenRun]:
    return write(file_url, tmp_path)


def objects(store: Store, suffix: str) -> list[str]:
    return [found.key for found in store.list(RUN) if found.key.endswith(suffix)]


# -- inspection -------------------------------------------------------------------------------------------------


def test_ls_of_root_and_of_run(cli: Cli, url: str, run: WrittenRun, tmp_path: Path) -> None:
    """A root lists runs. A run, given in any form, lists checkpoints."""
    write(url, tmp_path / "other", "solo")
    runs = json_output(cli, "ls", url)["runs"]
    assert [(one["run"], one["newest_step"], one["checkpoints"], one["stopped"]) for one in runs] == [
        ("solo", 300, 3, None),
        (RUN, 300, 3, None),
    ]
    for arguments in ((run_url(url),), (url, "--run", RUN)):
        found = json_output(cli, "ls", *arguments)
        assert [one["step"] for one in found["checkpoints"]] == [100, 200, 300]
        assert [one["kind"] for one in found["checkpoints"]] == ["full", "delta", "delta"]
        assert [one["chain"] for one in found["checkpoints"]] == [[2], [3, 2], [4, 3, 2]]
        assert found["checkpoints"][0]["pins"] == ["best"]
        assert found["checkpoints"][2]["encodings"] == {ITEMS.fqn: ["q8"]}
    code, text = cli("ls", run_url(url))
    assert code == 0
    assert "delta on 3" in text
    assert "3 live checkpoints of 3 committed in 1 attempt" in text
    assert "solo" in cli("ls", url)[1]


def test_inspect(cli: Cli, url: str, run: WrittenRun) -> None:
    """A root with one run needs no --run."""
    found = json_output(cli, "inspect", url, "-c", "step:100")
    assert found["metadata"] == {"git": "abc"}
    assert [(t["table"], t["held_rows"], t["encodings"]) for t in found["tables"]] == [
        (ITEMS.fqn, ITEMS.rows, ["fp32"]),
        (HALF.fqn, HALF.rows, ["bf16"]),
    ]
    assert set(found["blobs"]) == {"dense/mlp.0.weight", "dense/odd", "meta", "optim/0"}
    assert found["summary"]["snapshot_at_s"] == 1_700_000_000.25
    code, text = cli("inspect", url)
    assert code == 0
    assert ITEMS.fqn in text
    assert "2023-11-14" in text


def test_rank_blobs_are_shown_but_not_treated_as_run_blobs(cli: Cli, file_url: str, tmp_path: Path) -> None:
    """`inspect` counts rank blobs by name. `restore` omits them. `verify` and `diff` read each of them."""
    written = WrittenRun(open_store(file_url), RUN, tmp_path)
    trees = [bytes(typed_tree.encode({"seed": seed}).to_bytes()) for seed in range(3)]
    written.more_blobs = {"rng": trees[0], "rank/1/rng": trees[1], "rank/2/rng": trees[2]}
    written.save(step=100)
    written.more_blobs |= {"rank/2/rng": trees[0]}
    written.save(step=100)
    written.more_blobs |= {"rank/1/rng": b"no tree"}
    written.save(step=100)
    written.close()
    assert json_output(cli, "inspect", file_url)["blobs"].keys() >= {"rng", "rank/1/rng", "rank/2/rng"}
    shown = cli("inspect", file_url, "-c", "2")[1]
    assert "blobs (5, " in shown
    _, _, own = shown.partition("blobs of single ranks")
    assert own.splitlines()[2].split()[:2] == ["rng", "2"], own
    assert "rank/1/rng" not in shown
    assert "rank/1/rng" in cli("inspect", file_url, "-c", "2", "--all")[1]
    assert cli("restore", file_url, tmp_path / "out")[0] == 0
    assert "rng" in (held := json.loads((tmp_path / "out" / "manifest.json").read_text())["blobs"])
    assert not any(name.startswith("rank/") for name in held)
    found = json_output(cli, "diff", file_url, "2", "3")
    assert [blob["name"] for blob in found["blobs"]] == ["rank/2/rng"]
    assert cli("verify", file_url)[0] == 0
    code, text = cli("verify", file_url, "--deep")
    assert code == 1
    assert "rank/1/rng" in text


def test_which(cli: Cli, file_url: str, file_run: WrittenRun) -> None:
    """The selectors are latest, N, seq:N, step:N and pin:NAME. The error for another selector lists the checkpoints."""
    for which, step in (("latest", 300), ("3", 200), ("seq:3", 200), ("step:200", 200), ("pin:best", 100)):
        assert json_output(cli, "inspect", file_url, "-c", which)["summary"]["step"] == step
    for which in ("99", "pin:none", "none", "yesterday", "seq:x"):
        code, text = cli("inspect", file_url, "-c", which)
        assert code == 2, text
    assert "seq 4 (step 300)" in cli("inspect", file_url, "-c", "99")[1]


# -- verification -----------------------------------------------------------------------------------------------


def test_healthy_run_verifies(cli: Cli, url: str, run: WrittenRun) -> None:
    shallow = json_output(cli, "verify", url)
    assert shallow["ok"] is True
    assert (shallow["entries"], shallow["checkpoints"], shallow["indexes"]) == (5, [2, 3, 4], 3)
    deep = json_output(cli, "verify", "--deep", url)
    assert deep["ok"] is True
    assert deep["restored"] == [2, 3, 4]
    assert deep["frames"] == shallow["frames"] > 10
    code, text = cli("verify", "--deep", url)
    assert code == 0
    assert text.startswith("ok: 5 log entries, 3 live checkpoints")


def test_flipped_bit_is_found_by_deep_verify_only(cli: Cli, file_url: str, file_run: WrittenRun) -> None:
    """The report names the pack, the frame and the affected checkpoints. Other checkpoints still restore."""
    (pack, *_) = [key for key in objects(file_run.store, ".pack") if "/00000003/" in key]
    data = bytearray(file_run.store.get(pack))
    data[len(data) // 3] ^= 4
    file_run.store.put(pack, data)
    assert json_output(cli, "verify", file_url)["ok"] is True
    found = json_output(cli, "verify", "--deep", file_url)
    assert found["ok"] is False
    (problem,) = found["problems"]
    assert problem["object"] == pack.removeprefix(f"{RUN}/")
    assert "hash" in problem["what"]
    assert problem["checkpoints"] == [4]
    assert found["restored"] == [2, 3]
    code, text = cli("verify", "--deep", file_url)
    assert code == 1
    assert "1 problem" in text
    assert cli("verify", "--deep", file_url, "-c", "3")[0] == 0
    code, text = cli("restore", file_url, "unused-directory")
    assert code == 1
    assert "do not match its hash" in text
    assert not Path("unused-directory").exists()


def _packs_lost(store: Store) -> list[tuple[str, str, list[int]]]:
    """Without the baseline every checkpoint that builds on it is broken."""
    base = [key for key in objects(store, ".pack") if "/00000001/" in key]
    store.delete(base[:1])
    store.put(base[1], store.get(base[1])[:-64])
    return [(base[0], "does not exist", [2, 3, 4]), (base[1], "bytes", [2, 3, 4])]


def _index_snapshot(store: Store) -> list[tuple[str, str, list[int]]]:
    (index,) = [key for key in objects(store, ".index") if "/00000002/" in key]
    store.put(index, store.get(index)[:-3])
    return [(index, "", [3, 4])]


def _index_lost(store: Store) -> list[tuple[str, str, list[int]]]:
    ((index, _, needed),) = _index_snapshot(store)
    store.delete([index])
    return [(index, "", needed)]


def _other_encodings(store: Store) -> list[tuple[str, str, list[int]]]:
    """The log entry has other encodings than its indexes."""
    key = f"{RUN}/{entry_key(4)}"
    entry = json.loads(store.get(key))
    assert entry["encodings"] == {ITEMS.fqn: ["q8"]}
    store.put(key, rehashed(entry | {"encodings": {ITEMS.fqn: ["q4", "q8"]}}))
    return [(key, "encodings", [4])]


def _entry_lost(store: Store) -> list[tuple[str, str, list[int]]]:
    store.delete([f"{RUN}/{entry_key(3)}", *(info.key for info in store.list(f"{RUN}/log/fold-"))])
    return [(f"{RUN}/log/", "log entry 3 is missing", [])]


def _entry_changed(store: Store) -> list[tuple[str, str, list[int]]]:
    key = f"{RUN}/{entry_key(4)}"
    store.put(key, store.get(key).replace(b'"step":300', b'"step":301'))
    return [(key, "", [])]


@pytest.mark.parametrize(
    "damage", [_packs_lost, _index_snapshot, _index_lost, _other_encodings, _entry_lost, _entry_changed]
)
def test_damage_is_found_without_reading_contents(
    cli: Cli, file_url: str, file_run: WrittenRun, damage: Callable[[Store], list[tuple[str, str, list[int]]]]
) -> None:
    """The report names each object, its damage and the affected checkpoints."""
    wanted = damage(file_run.store)
    problems = json_output(cli, "verify", "--run", RUN, file_url)["problems"]
    assert [(each["object"], each["checkpoints"]) for each in problems] == [
        (key.removeprefix(f"{RUN}/"), needed) for key, _, needed in wanted
    ]
    assert all(what in each["what"] for each, (_, what, _) in zip(problems, wanted, strict=True))
    assert cli("verify", "--run", RUN, file_url)[0] == 1


@pytest.mark.parametrize("damage", ["flip", "empty", "garbage after it"])
def test_every_command_reports_damaged_log(
    cli: Cli, file_url: str, file_run: WrittenRun, tmp_path: Path, damage: str
) -> None:
    """Commands read the checkpoint before the damage, report this on stderr and in JSON, and exit with 1."""
    bad = 5 if damage == "garbage after it" else 4
    key = f"{RUN}/{entry_key(bad)}"
    whole = bytearray() if bad == 5 else bytearray(file_run.store.get(key))
    if damage == "flip":
        whole[len(whole) // 2] ^= 1
    file_run.store.put(key, {"flip": bytes(whole), "empty": b"", "garbage after it": b"rubbish"}[damage])
    warning = f"the log cannot be followed past entry {bad}: "
    for number, arguments in enumerate(
        (
            ("ls", run_url(file_url)),
            ("ls", file_url),
            ("inspect", file_url),
            ("diff", file_url, "2", "2"),
            ("restore", file_url, tmp_path / "restored{}"),
            ("export", file_url, tmp_path / "exported{}.safetensors"),
        )
    ):
        for as_json in (False, True):
            given = [str(one).replace("{}", f"{number}{as_json}") for one in arguments]
            code, text = cli(*given, *(["--json"] if as_json else []))
            assert code == 1, (given, text)
            assert f"warning: {warning}" in text or f"warning: {RUN}: {warning}" in text
            if as_json:
                assert warning in json.JSONDecoder().raw_decode(text)[0]["warning"]
    for command in (("gc", file_url), ("compact", file_url), ("inspect", file_url, "-c", "seq:9")):
        code, text = cli(*command)
        assert code == 1, text
        assert warning in text
    assert "error: " in text


def test_log_without_first_entry_is_a_damaged_run(
    cli: Cli, file_url: str, file_run: WrittenRun, tmp_path: Path
) -> None:
    """Every form of the run's URL reports the gap. If a folded state follows, only `verify` reports it."""
    file_run.store.delete([f"{RUN}/{entry_key(0)}"])
    for arguments in (
        ("ls", run_url(file_url)),
        ("inspect", file_url),
        ("gc", run_url(file_url), "--dry-run"),
    ):
        code, text = cli(*arguments)
        assert code == 0, text
    found = json_output(cli, "verify", run_url(file_url))
    assert [problem["object"] for problem in found["problems"]] == [entry_key(0)]
    file_run.store.delete([info.key for info in file_run.store.list(f"{RUN}/log/fold-")])
    for arguments in (("ls", run_url(file_url)), ("inspect", file_url), ("gc", run_url(file_url))):
        code, text = cli(*arguments)
        assert code == 3, text
        assert "log entry 0 is missing" in text
        assert "Traceback" not in text
    code, text = cli("verify", file_url)
    assert code == 1
    assert "log entry 0 is missing" in text
    write(file_url, tmp_path / "other", "solo")
    code, text = cli("ls", file_url, "--json")
    assert code == 1
    found = json.JSONDecoder().raw_decode(text)[0]
    assert [(one["run"], one["stopped"]) for one in found["runs"]] == [
        ("solo", None),
        (RUN, found["warning"].partition(": ")[2]),
    ]


# -- restore and export -----------------------------------------------------------------------------------------


def test_restore_writes_snapshot_exactly(cli: Cli, url: str, run: WrittenRun, tmp_path: Path) -> None:
    """The manifest describes every array, bit for bit. Blobs are trees. An existing directory is never overwritten."""
    out = tmp_path / "restored"
    code, text = cli("restore", url, out, "-c", "step:200")
    assert code == 0
    assert "2 tables, 5 arrays, 3 blobs" in text
    manifest = json.loads((out / "manifest.json").read_text())
    items, half, dense = run.saved[3]
    assert (manifest["step"], manifest["seq"], manifest["run"]) == (200, 3, RUN)
    held = manifest["tables"][ITEMS.fqn]
    np.testing.assert_array_equal(np.load(out / held["weight"]["file"]), items.weights)
    for name, values in items.fields.items():
        np.testing.assert_array_equal(np.load(out / held["fields"][name]["file"]), values)
    users = manifest["tables"][HALF.fqn]["weight"]
    assert users["dtype"] == "bfloat16"
    np.testing.assert_array_equal(np.load(out / users["file"]), half.weights)
    np.testing.assert_array_equal(np.load(out / manifest["dense"]["mlp.0.weight"]["file"]), dense)
    assert (out / manifest["blobs"]["meta"]["file"]).stat().st_size == manifest["blobs"]["meta"]["bytes"]
    code, text = cli("restore", url, out)
    assert code == 2
    assert "already exists" in text
    assert "--force" not in text
    assert not list(tmp_path.glob(".*partial"))


def test_export_safetensors(cli: Cli, file_url: str, file_run: WrittenRun, tmp_path: Path) -> None:
    """The safetensors library reads the file, including bfloat16, with and without optimizer state."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    file = tmp_path / "model.safetensors"
    items, half, dense = file_run.saved[2]
    code, text = cli("export", file_url, file, "-c", "pin:best")
    assert code == 0
    assert "left out, not plain tensors: dense/odd" in text
    found = load_file(file)
    assert set(found) == {ITEMS.fqn, HALF.fqn, "mlp.0.weight"}
    np.testing.assert_array_equal(found[ITEMS.fqn].numpy(), items.weights)
    np.testing.assert_array_equal(found[HALF.fqn].view(torch.uint16).numpy(), half.weights)
    np.testing.assert_array_equal(found["mlp.0.weight"].numpy(), dense)
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["step"] == "100"
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert length % 8 == 0
    code, text = cli("export", file_url, file)
    assert code == 2
    assert "or use --force" in text
    assert cli("export", file_url, file, "-c", "2", "--force", "--state")[0] == 0
    found = load_file(file)
    np.testing.assert_array_equal(found[f"{ITEMS.fqn}.sum"].numpy(), items.fields["sum"])
    np.testing.assert_array_equal(found[f"{ITEMS.fqn}.exp_avg"].numpy(), items.fields["exp_avg"])


# -- comparison -------------------------------------------------------------------------------------------------


def test_diff(cli: Cli, file_url: str, file_run: WrittenRun) -> None:
    """The output has changed rows, largest differences and different blobs. The exit code is 0 if equal, else 1."""
    found = json_output(cli, "diff", file_url, "2", "3")
    before, after = file_run.saved[2], file_run.saved[3]
    changed = int((before[0].weights != after[0].weights).any(axis=1).sum())
    by_name = {(one["table"], one["field"]): one for one in found["tables"]}
    assert by_name[ITEMS.fqn, ""]["rows_differing"] == changed > 0
    assert by_name[ITEMS.fqn, ""]["largest"] == pytest.approx(1.0)
    assert by_name[ITEMS.fqn, "sum"]["rows_differing"] == changed
    assert by_name[HALF.fqn, ""]["rows_differing"] == 0
    assert {blob["name"] for blob in found["blobs"]} == {"dense/mlp.0.weight", "meta"}
    assert {blob["name"]: blob["largest"] for blob in found["blobs"]}["dense/mlp.0.weight"] == pytest.approx(
        0.25
    )
    assert cli("diff", file_url, "2", "3")[0] == 1
    code, text = cli("diff", file_url, "latest", "step:300")
    assert code == 0
    assert "all bits are equal" in text


# -- compaction -------------------------------------------------------------------------------------------------


def test_compact(cli: Cli, url: str, run: WrittenRun) -> None:
    """The chain becomes one baseline, and commands show the baseline's size. A second call does nothing."""
    before = read_checkpoint(run.store, RUN)
    assert json_output(cli, "compact", url)["compacted"]["replaces"] == 4
    found = json_output(cli, "ls", run_url(url))["checkpoints"][-1]
    # Rows and bytes are those of the compacted baseline, and not those of the delta.
    moved = RunLog(run.store, RUN).refresh().compactions[4]
    packs = sum(i.size_bytes for i in run.store.list(f"{RUN}/{moved.parts[0].prefix}"))
    assert (found["rows"], found["stored_bytes"]) == (ITEMS.rows + HALF.rows, packs)
    assert (found["compacted"], found["chain"], found["kind"], found["covers"]) == (True, [4], "full", [])
    assert found["encodings"] == {ITEMS.fqn: ["fp32", "q8"], HALF.fqn: ["bf16"]}
    inspected = json_output(cli, "inspect", url)
    assert (inspected["summary"], inspected["compacted_at_s"]) == (found, moved.at_s)
    assert_same(read_checkpoint(run.store, RUN), before)
    assert json_output(cli, "verify", "--deep", url)["ok"] is True
    assert "already" in cli("compact", url)[1]


# -- errors -----------------------------------------------------------------------------------------------------


def test_caller_error_exits_2(cli: Cli, file_url: str, file_run: WrittenRun, tmp_path: Path) -> None:
    """The errors are in URL, run, bucket and usage. Each message names the remedy."""
    write(file_url, tmp_path / "more", "another")
    for arguments, message in (
        (("ls", f"{tmp_path}/nowhere"), "does not exist"),
        (("ls", "ftp://bucket"), "s3://"),
        (("verify", file_url), "another, team/run-1"),
        (("verify", file_url, "--run", "typo"), "another, team/run-1"),
        (("verify", file_url, "--run", "../up"), "cannot name a run"),
        (("gc", file_url, "--run", RUN, "--grace", "nan"), "not a finite number"),
        (("gc", file_url, "--run", RUN, "--every-steps", "5"), "need --keep-last"),
        (("gc", file_url, "--run", RUN, "--keep-last", "1", "--every-hours", "inf"), "not a finite number"),
        (("gc", file_url, "--run", RUN, "--keep-last", "1", "--every-hours", "0"), "not in the range"),
    ):
        code, text = cli(*arguments)
        assert code == 2, text
        assert message in text
    (tmp_path / "empty").mkdir()
    assert cli("verify", tmp_path / "empty")[0] == 2
    assert cli("ls", tmp_path / "empty")[0] == 0


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_invalid_output_path_exits_2(
    cli: Cli, file_url: str, file_run: WrittenRun, tmp_path: Path, name: str
) -> None:
    """The path is a file instead of a directory, or an existing file. Nothing is left behind or changed."""
    (tmp_path / "file").write_text("")
    (tmp_path / name).write_text("")
    for place, message in ((tmp_path / "file" / name, "not writable"), (tmp_path / name, "exists")):
        code, text = cli("export", file_url, place)
        assert code == 2, text
        assert message in text
        assert "Traceback" not in text
    assert (tmp_path / name).read_text() == ""
    assert not list(tmp_path.glob(".*partial"))
    assert cli("restore", file_url, tmp_path / "file" / "restored")[0] == 2


def test_environment_error_exits_3(cli: Cli, minio_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is unreachable. The error appears within the deadline, also as JSON."""
    from deltashard_checkpoint.stores.retry import RetryPolicy
    from deltashard_cli import target

    with monkeypatch.context() as patched:
        patched.setattr(target, "POLICY", RetryPolicy(deadline_s=0.5))
        code, text = cli("verify", f"s3://bucket/run?endpoint=http://127.0.0.1:{free_port()}", "--json")
    assert code == 3
    document = json.loads(text[: text.rindex("}") + 1])
    assert document["error"]["kind"] == "StoreUnavailable"
    assert document["error"]["exit"] == 3
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, text = cli("ls", minio_url)
    assert code == 2
    assert "SignatureDoesNotMatch" in text


def test_internal_error_exits_4(
    cli: Cli, file_url: str, file_run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error shows its traceback and asks for a report."""
    from deltashard_cli import read_command

    def broken(_url: str, _run: str | None) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(read_command, "find_run", broken)
    code, text = cli("inspect", file_url)
    assert code == 4
    assert "Traceback" in text
    assert "report" in text


def test_installed_command(file_url: str, file_run: WrittenRun, tmp_path: Path) -> None:
    """In a separate process with pipes, tables have no colour and no progress bar, and exit codes are as documented."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "80"}
        return subprocess.run(
            [SCRIPT, *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False
        )

    done = run("verify", "--deep", file_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: ")
    assert "\x1b" not in done.stdout
    file_run.store.delete(objects(file_run.store, ".pack")[:1])
    assert run("verify", file_url).returncode == 1
    gone = subprocess.Popen([SCRIPT, "verify", file_url], stdout=subprocess.PIPE)
    gone.stdout.close()  # as with `| head`
    assert gone.wait(120) == 1, "the exit code of the verification"
    for arguments in (("ls", file_url), ("inspect", run_url(file_url), "--json")):
        # A pipe of one page fills before the document ends, so that a write also fails in the middle.
        broken = subprocess.Popen([SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert broken.stdout is not None
        assert broken.stderr is not None
        fcntl.fcntl(broken.stdout, fcntl.F_SETPIPE_SZ, 4096)
        broken.stdout.close()
        errors = broken.stderr.read()
        broken.stderr.close()
        assert (broken.wait(120), errors) == (0, b"")
    helped = run("--help")
    assert helped.returncode == 0
    assert "Exit codes" in helped.stdout
