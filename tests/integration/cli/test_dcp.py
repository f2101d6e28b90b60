"""Export to and import from torch.distributed.checkpoint, read and written by plain torch in one process and many."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deltashard
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
from deltashard_checkpoint.stores.url import open_store
from deltashard_cli.dcp import importer
from deltashard_cli.dcp.reader import StoredTensor, TensorChunk, read_chunk
from deltashard_cli.dcp.writer import export_dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.support.checkpoint.written_run import HALF, ITEMS, WrittenRun
from tests.support.command_line import Cli
from tests.support.trainer.rank_zygote import RankZygote

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]
Checkpointers = Callable[..., deltashard.Checkpointer]
GOLDEN = Path(__file__).parents[2] / "golden" / "v1"
LIVE_SEQS = (4, 5, 7, 9, 10, 13)
"""Checkpoints of the golden multi-rank run."""


@pytest.fixture
def checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpointers:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)

    def build(net: nn.Module, optimizer: Any, run: str = "r") -> deltashard.Checkpointer:
        return deltashard.Checkpointer(
            net,
            optimizer,
            url=tmp_path / "store",
            run=run,
            encoding="fp32",
            arena_bytes=64 << 20,
            grace_s=None,
        )

    return build


class DcpNet(nn.Module):
    """Two tables, one of which has no typical embedding name, and optionally a norm and a dense layer."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embeddings = nn.ModuleDict({"goods": nn.EmbeddingBag(300, 8, mode="sum")})
        self.places = nn.Embedding(40, 6)
        if dense:
            self.top = nn.Sequential(nn.BatchNorm1d(14), nn.Linear(14, 1))
        else:
            self.register_buffer("top_weight", torch.randn(14, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.embeddings["goods"](ids), self.places(ids[:, 0] % 40)], 1)
        return self.top(both) if hasattr(self, "top") else both @ self.top_weight


ModelAndOptimizer = tuple[DcpNet, torch.optim.Optimizer]


def make_training(kind: str) -> ModelAndOptimizer:
    net = DcpNet(dense=kind in ("Adagrad", "Adam"))
    if kind == "Adam":
        return net, torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    if kind == "Adagrad":  # in two parameter groups
        rest = [param for name, param in net.named_parameters() if "goods" not in name]
        return net, torch.optim.Adagrad(
            [{"params": net.embeddings.parameters(), "lr": 0.1}, {"params": rest}]
        )
    return net, deltashard.optim.RowWiseAdagrad(net.parameters(), lr=0.05)


OPTIMIZERS = ("Adagrad", "Adam", "deltashard.optim.RowWiseAdagrad")


def train(model: ModelAndOptimizer, steps: range, ckpt: deltashard.Checkpointer | None = None) -> None:
    net, optimizer = model
    for step in steps:
        ids = torch.randint(300, (16, 4), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(ids).square().mean().backward()
        optimizer.step()
        if ckpt is not None:
            ckpt.step()


def same(a: ModelAndOptimizer, b: ModelAndOptimizer) -> None:
    """Assert that weights, buffers, groups and optimizer state are equal bit for bit."""
    for name, value in a[0].state_dict().items():
        assert torch.equal(value, b[0].state_dict()[name]), name
    held, other = (optimizer.state_dict() for optimizer in (a[1], b[1]))
    assert held["param_groups"] == other["param_groups"]
    assert held["state"].keys() == other["state"].keys()
    for number, entry in held["state"].items():
        for key, value in entry.items():
            found = other["state"][number][key]
            assert torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found, key


def whole_of(model: ModelAndOptimizer) -> dict[str, Any]:
    """Return the state dict that `export --format dcp --state` writes."""
    return get_model_state_dict(model[0]) | {"optimizer": get_optimizer_state_dict(model[0], model[1])}


def read_back(directory: Path) -> dict[str, Any]:
    dcp_to_torch_save(directory, directory.parent / "back.pt")
    found = torch.load(directory.parent / "back.pt", weights_only=True)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def by_ranks(rank_zygote: RankZygote) -> Callable[..., list[Any]]:
    """Return a function that runs `save` or `load` of `dcp_ranks` in several processes of plain torch."""
    return partial(rank_zygote.run, "tests.integration.cli.dcp_ranks")


# -- export -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", LIVE_SEQS)
def test_multi_rank_run_exports_in_every_format(cli: Cli, tmp_path: Path, seq: int) -> None:
    """Tables are split by rows and by columns, one rank's part after another."""
    url = shutil.copytree(GOLDEN / "run-3", tmp_path / "store" / "run-3")
    expected = {path.stem: np.load(path) for path in (GOLDEN / "run-3-expected" / str(seq)).glob("*.npy")}
    assert len(expected) == 5
    for name in ("all.pt", "all.safetensors", "all"):
        kind = [] if "." in name else ["--format", "dcp"]
        assert cli("export", url, tmp_path / name, "-c", seq, "--state", *kind)[0] == 0
    for found in (
        torch.load(tmp_path / "all.pt", weights_only=True),
        load_file(tmp_path / "all.safetensors"),
    ):
        assert expected.keys() < found.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name].numpy(), values)
    loaded = read_back(tmp_path / "all")
    state = loaded.pop("optimizer")["state"]
    for fqn in [name for name in expected if name in loaded]:
        np.testing.assert_array_equal(loaded[fqn].numpy(), expected[fqn])
        for key, values in state[fqn].items():
            np.testing.assert_array_equal(values.numpy(), expected[f"{fqn}.{key}"])
    fields = {f"{fqn}.{key}" for fqn in loaded if fqn in state for key in state[fqn]}
    assert expected.keys() <= loaded.keys() | fields


def opened(url: str, run: str) -> OpenCheckpoint:
    store = open_store(url)
    state = RunLog(store, run).refresh()
    newest = state.newest()
    assert newest is not None
    return OpenCheckpoint.of(store, state, newest)


@pytest.mark.slow
def test_many_ranks_load_single_process_export(
    by_ranks: Callable[..., list[Any]], cli: Cli, tmp_path: Path
) -> None:
    """Plain dcp.load reads DTensors by rows and columns, ShardedTensors and unsharded tensors."""
    run = WrittenRun(open_store(f"file://{tmp_path}/store"), "r", tmp_path / "w")
    base = run.save(step=1)
    run.save(run.train(), step=2, covers=base)
    run.close()
    read: list[tuple[str, int, int]] = []

    class WatchedReader(OpenCheckpoint):
        def span(self, schema: Any, start: int, stop: int, **options: Any) -> Any:
            read.append((schema.fqn, start, stop))
            return super().span(schema, start, stop, **options)

        def tables(self, *_given: Any, **_options: Any) -> Any:
            raise AssertionError("the export reads a whole table")

    at = opened(f"file://{tmp_path}/store", "r")
    watched = WatchedReader(store=at.store, state=at.state, entry=at.entry, indexes=at.indexes)
    row_bytes = 2 * 16 * 4 + 4
    written = export_dcp(
        watched, tmp_path / "exported", state=True, advance=lambda _count: None, shard_bytes=700 * row_bytes
    )
    # Ranges of 700 rows, each of which is read once for the weights and both fields.
    assert [span for span in read if span[0] == ITEMS.fqn] == [
        (ITEMS.fqn, start, min(start + 700, 3000)) for start in range(0, 3000, 700)
    ]
    metadata = dcp.FileSystemReader(tmp_path / "exported").read_metadata()
    assert [chunk.sizes[0] for chunk in metadata.state_dict_metadata[ITEMS.fqn].chunks] == [700] * 4 + [200]
    assert metadata.storage_meta.checkpoint_id is None, "the metadata holds no path of the export"
    assert written.skipped == ("dense/odd",)
    assert written.bytes == sum(path.stat().st_size for path in (tmp_path / "exported").iterdir())
    items, half, dense = run.saved[at.entry.seq]
    whole = {
        ITEMS.fqn: torch.from_numpy(items.weights),
        HALF.fqn: torch.from_numpy(half.weights).view(torch.bfloat16),
        "mlp.0.weight": torch.from_numpy(dense),
        f"optimizer.state.{ITEMS.fqn}.sum": torch.from_numpy(items.fields["sum"]),
        f"optimizer.state.{ITEMS.fqn}.exp_avg": torch.from_numpy(items.fields["exp_avg"]),
    }
    torch.save(whole, tmp_path / "whole.pt")
    by_ranks(tmp_path, 3, "load")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_exported_model_resumes_in_plain_torch(
    cli: Cli, checkpointer: Checkpointers, tmp_path: Path, kind: str
) -> None:
    """With dcp.load and torch's setters, model and optimizer equal those of uninterrupted training bit for bit."""
    lost = make_training(kind)
    with checkpointer(*lost) as ckpt:
        assert ckpt.restore() is None
        train(lost, range(5), ckpt)
        ckpt.save().wait(240)
    code, text = cli("export", tmp_path / "store" / "r", tmp_path / "out", "--format", "dcp", "--state")
    assert code == 0
    assert "left out" not in text
    fresh = make_training(kind)
    train(fresh, range(90, 91))
    found = whole_of(fresh)
    dcp.load(found, checkpoint_id=tmp_path / "out")
    set_optimizer_state_dict(*fresh, optim_state_dict=found.pop("optimizer"))
    set_model_state_dict(fresh[0], found)
    same(lost, fresh)
    train(lost, range(5, 8))
    train(fresh, range(5, 8))
    same(lost, fresh)


def test_export_is_atomic(cli: Cli, tmp_path: Path) -> None:
    """An error while rows are read leaves no files behind. An export replaces no existing files."""
    run = WrittenRun(open_store(f"file://{tmp_path}/store"), "r", tmp_path / "w")
    run.save(step=1)
    run.close()
    assert cli("export", tmp_path / "store", tmp_path / "out", "--format", "dcp")[0] == 0
    code, text = cli("export", tmp_path / "store", tmp_path / "out", "--format", "dcp", "--force")
    assert code == 2
    assert "already exists" in text
    code, text = cli("export", tmp_path / "store", tmp_path / "out", "--format", "torch", "--force")
    assert code == 2
    assert "is a directory" in text
    for info in list(run.store.list("r/")):
        if info.key.endswith("00001.pack"):
            data = bytearray(run.store.get(info.key))
            data[len(data) // 2] ^= 1
            run.store.put(info.key, bytes(data))
    code, text = cli("export", tmp_path / "store", tmp_path / "torn", "--format", "dcp", "--state")
    assert code == 1
    assert "do not match its hash" in text
    assert "Traceback" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store", "w"]


# -- import -----------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_resumes_from_import(
    cli: Cli, checkpointer: Checkpointers, tmp_path: Path, kind: str
) -> None:
    """A trainer restores a checkpoint of plain torch in full and continues bit for bit.

    Its next checkpoints are deltas.
    """
    plain = make_training(kind)
    train(plain, range(5))
    saved = {"model": get_model_state_dict(plain[0]), "optim": get_optimizer_state_dict(*plain), "epoch": 2}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    command = ("import", tmp_path / "store", tmp_path / "saved", "--run", "r", "--step", 5)
    code, text = cli(*command, "--optimizer", kind, "--tables", "embeddings.*", "--tables", "places.weight")
    assert code == 0, text
    assert "tables (as given): embeddings.goods.weight, places.weight" in text
    assert "left out: epoch" in text
    moved = make_training(kind)
    with checkpointer(*moved) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.seq, restored.notes) == (5, 2, ())
        same(plain, moved)
        train(moved, range(5, 8), ckpt)
        ckpt.save().wait(240)
        train(moved, range(8, 9), ckpt)
        ckpt.save().wait(240)
    train(plain, range(5, 9))
    same(plain, moved)
    again = make_training(kind)
    with checkpointer(*again) as ckpt:
        assert ckpt.restore() is not None
        same(plain, again)
    assert cli("verify", "--deep", tmp_path / "store" / "r")[0] == 0


@pytest.mark.slow
def test_multi_rank_checkpoint_is_imported(
    by_ranks: Callable[..., list[Any]], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DTensors by rows and by columns, uneven ShardedTensors and replicas give the same run, bit for bit.

    Tables are read in ranges of a few rows across the borders of pieces. Each piece is read once.
    """
    read: list[str] = []

    def watched(stored: StoredTensor, chunk: TensorChunk) -> Any:
        read.append(stored.name)
        return read_chunk(stored, chunk)

    monkeypatch.setattr(importer, "_RANGE_BYTES", 999)
    monkeypatch.setattr(importer, "read_chunk", watched)
    generator = torch.Generator().manual_seed(5)
    whole = {
        "emb.items.weight": torch.randn(301, 10, generator=generator),
        "emb.users.weight": torch.randn(57, 6, generator=generator).bfloat16(),
        "emb.double.weight": torch.randn(11, 5, generator=generator).double(),
        "emb.half.weight": torch.randn(9, 4, generator=generator).half(),
        "top.weight": torch.randn(5, 3, generator=generator),
        "top.bias": torch.randn(7, generator=generator),
    }
    torch.save(whole, tmp_path / "whole.pt")
    by_ranks(tmp_path, 2, "save")
    for kind in ("rows", "columns", "sharded", "plain", "replicated"):
        code, text = cli("import", tmp_path / "store", tmp_path / f"saved-{kind}", "--run", kind, "--json")
        assert code == 0, text
        done = json.loads(text)
        assert done["verified"] is True
        assert done["imported"]["tables"] == sorted(name for name in whole if name.startswith("emb"))
        assert (done["imported"]["tables_guessed"], done["imported"]["matrices"]) == (True, ["top.weight"])
        assert done["imported"]["left_out"] == ["step"]
        stored = dcp.FileSystemReader(tmp_path / f"saved-{kind}").read_metadata().state_dict_metadata
        chunks = {f"model.{name}": len(stored[f"model.{name}"].chunks) for name in whole if "emb" in name}
        assert set(chunks.values()) == ({1} if kind in ("plain", "replicated") else {2})
        assert Counter(read) == chunks
        read.clear()
        with deltashard.open_checkpoint(tmp_path / "store", kind) as checkpoint:
            assert checkpoint.metadata["imported"] == "torch.distributed.checkpoint"
            for name, value in whole.items():
                found = (
                    checkpoint.table(name).weights if name in checkpoint.tables else checkpoint.dense[name]
                )
                assert (found.dtype, bits(found)) == (value.dtype, bits(value)), (kind, name)


def test_special_float_values_are_preserved(cli: Cli, tmp_path: Path) -> None:
    """The values are NaNs with payloads, infinities, zeros of both signs, and denormals."""
    odd = torch.tensor([0x7FC00123, 0x7F800000, -0x80000000, 0x00000001, -0x7FFFFF, 0], dtype=torch.int32)
    table = odd.view(torch.float32).repeat(200, 2)
    dcp.save({"emb.weight": table, "n": torch.tensor(3), "none": torch.zeros(0)}, checkpoint_id=tmp_path / "saved")  # fmt: skip
    assert cli("import", tmp_path / "store", tmp_path / "saved", "--run", "r")[0] == 0
    assert cli("export", tmp_path / "store", tmp_path / "out", "--format", "dcp")[0] == 0
    found = read_back(tmp_path / "out")
    assert bits(found["emb.weight"]) == bits(table)
    assert found["n"].item() == 3
    assert found["none"].shape == (0,)


# -- refused imports ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a directory that plain torch wrote for a model and its optimizer."""
    plain = make_training("Adagrad")
    train(plain, range(2))
    held = {"model": get_model_state_dict(plain[0]), "optim": get_optimizer_state_dict(*plain)}
    dcp.save(held, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def assert_nothing_written(tmp_path: Path) -> bool:
    return not any(path.is_file() for path in (tmp_path / "store").rglob("*"))


def test_incomplete_directory_is_refused(cli: Cli, saved: Path, tmp_path: Path) -> None:
    """No run is created, whether the error appears in the metadata or while data are read."""
    data = saved / "__0_0.distcp"
    whole = data.read_bytes()
    for damaged, message in ((whole[:-1], "a file is too short"), (bytes(len(whole)), "cannot be read")):
        data.write_bytes(damaged)
        code, text = cli("import", tmp_path / "store", saved, "--run", "r")
        assert code == 2, text
        assert message in text
        assert "Traceback" not in text
        assert assert_nothing_written(tmp_path)
    data.write_bytes(whole)
    assert cli("import", tmp_path / "store", saved, "--run", "r")[0] == 0


def test_unreadable_table_commits_nothing(cli: Cli, saved: Path, tmp_path: Path) -> None:
    """Tables are read while they are written. The opened run has no checkpoint, and is not listed as a run."""
    reader = dcp.FileSystemReader(saved)
    stored = reader.read_metadata().storage_data
    info = next(info for index, info in stored.items() if index.fqn == "model.embeddings.goods.weight")
    data = bytearray((saved / info.relative_path).read_bytes())
    data[info.offset : info.offset + 64] = bytes(64)
    (saved / info.relative_path).write_bytes(bytes(data))
    code, text = cli("import", tmp_path / "store", saved, "--run", "r")
    assert code == 2
    assert "model.embeddings.goods.weight cannot be read" in text
    state = RunLog(open_store(f"file://{tmp_path}/store"), "r").refresh()
    assert state.checkpoints == {}
    code, text = cli("import", tmp_path / "store", saved, "--run", "r")
    assert code == 2
    assert "already exists" in text


def test_pickled_objects_are_not_loaded(cli: Cli, tmp_path: Path) -> None:
    """A value that requires full unpickling is omitted, or refused where it is required."""

    class Ran(list):
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    model = {"emb.weight": torch.ones(3, 2)}
    optim = {"state": {}, "param_groups": [{"lr": Ran(), "params": ["emb.weight"]}]}
    dcp.save({"model": model, "optim": optim, "more": Ran()}, checkpoint_id=tmp_path / "saved")
    code, text = cli("import", tmp_path / "store", tmp_path / "saved", "--run", "r")
    assert code == 0, text
    assert "left out: more" in text
    code, text = cli("import", tmp_path / "store", tmp_path / "saved", "--run", "s", "--optimizer", "SGD")
    assert code == 2, text
    assert "optim.param_groups.0.lr cannot be read" in text
    assert not (tmp_path / "ran").exists()


def test_import_refuses_existing_run(cli: Cli, saved: Path, tmp_path: Path) -> None:
    """An import starts a new run in a store."""
    assert cli("import", tmp_path / "store", saved, "--run", "r")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    code, text = cli("import", tmp_path / "store", saved, "--run", "r")
    assert code == 2
    assert "the run already exists" in text
    assert "--run" in text
    code, text = cli("import", tmp_path / "store" / "r", saved, "--run", "s")
    assert code == 2
    assert "this URL is a run, not a store" in text
    code, text = cli("import", tmp_path / "store", saved, "--run", "team/log")
    assert code == 2
    assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()} == before


def test_ambiguous_import_asks_for_options(cli: Cli, saved: Path, tmp_path: Path) -> None:
    """The message lists the candidates for the model's dict, the tables, and the optimizer's state."""
    model = {"emb.weight": torch.ones(3, 2), "top.weight": torch.ones(2, 2), "top.bias": torch.ones(2)}
    adagrad = torch.optim.Adagrad([nn.Parameter(torch.ones(3, 2))])
    two = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["emb.weight"]}]}
    odd = {"state": {"other.weight": {"sum": torch.ones(3, 2)}}, "param_groups": [{"params": ["emb.weight"]}]}
    for name, held, arguments, message in (
        ("two", {"left": model, "right": model}, ("--model", "middle"), "one of: 'left', 'right'"),
        ("none", {"epoch": 3}, (), "the directory has no tensors"),
        ("m", {"model": model}, ("--tables", "items.*"), "no tensor matches 'items.*'"),
        ("m", {"model": model}, ("--tables", "top.bias"), "top.bias is float32 [2], which cannot be a table"),
        ("m", {"model": model}, ("--without", "x*"), "no tensor matches 'x*'"),
        ("m", {"model": model}, ("--optimizer", "Adagrad"), "the directory has 0 optimizers"),
        ("b", {"model": model, "a": two, "b": two}, ("--optimizer", "Adagrad"), "the directory has 2 optimizers"),
        ("n", {"model": model, "o": adagrad.state_dict()}, ("--optimizer", "Adagrad"), "get_optimizer_state_dict"),
        ("o", {"model": model, "o": odd}, ("--optimizer", "Adagrad"), "state of 'other.weight'"),
        ("s", {"model": model, "o": two}, ("--optimizer", "Adagrat"), "torch.optim has no 'Adagrat'"),
    ):  # fmt: skip
        if not (tmp_path / name).exists():
            dcp.save(held, checkpoint_id=tmp_path / name)
        code, text = cli("import", tmp_path / "store", tmp_path / name, "--run", "r", *arguments)
        assert code == 2, text
        assert message in text
        assert assert_nothing_written(tmp_path)
    code, text = cli("import", tmp_path / "store", tmp_path / "two", "--run", "r", "--model", "left", "--without", "top.*")  # fmt: skip
    assert code == 0, text
    assert "left out: top.bias: as requested" in text
    assert "left out: right.emb.weight" in text
    with deltashard.open_checkpoint(tmp_path / "store", "r") as checkpoint:
        assert list(checkpoint.tables) == ["emb.weight"]
        assert list(checkpoint.dense) == []
    del saved


def test_missing_torch_is_reported(
    cli: Cli, tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WrittenRun(open_store(f"file://{tmp_path}/store"), "r", tmp_path / "w")
    run.save(step=1)
    run.close()
    monkeypatch.setitem(sys.modules, "torch", None)
    for arguments in (
        ("export", tmp_path / "store", tmp_path / "out", "--format", "dcp"),
        ("export", tmp_path / "store", tmp_path / "out.pt"),
        ("import", tmp_path / "store", saved, "--run", "s"),
    ):
        code, text = cli(*arguments)
        assert code == 2
        assert "torch" in text
    assert cli("export", tmp_path / "store", tmp_path / "out.safetensors")[0] == 0
    assert not (tmp_path / "out").exists()
