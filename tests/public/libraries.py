# ruff: noqa: NPY002 - recbole draws from numpy's global generator
"""Small programs as users of public libraries write them; each runs without interruption, and killed and resumed.

Run as a module, `libraries WORKDIR {PROGRAM: STEP}`: three processes of each program are forked from this one, which
has imported its library and has no threads. The second is killed after that step. It prints
{PROGRAM: {PROCESS: exit code}}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deltashard
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.trainer.verdict import CapturedLog, bits, optimizer_bits

ROWS, SAMPLES, BATCH, EPOCHS = 900, 92, 8, 3
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)


@dataclass
class LibraryProgramRun:
    """One process of a program."""

    store: Path
    kill: int = 0
    """The step after which it is killed, two steps after its newest save. 0: never."""
    reported: list[str] = field(default_factory=list)

    def checkpointer(self, model: nn.Module, optimizer: Any, **state: Any) -> deltashard.Checkpointer:
        ckpt = deltashard.Checkpointer(
            model, optimizer, state=state, url=self.store, run="run", encoding="fp32", every_steps=5,
            arena_bytes=32 << 20, on_event=lambda kind, facts: self.reported.append(f"event {kind}: {dict(facts)}"),
        )  # fmt: skip
        resumed = ckpt.restore()
        self.reported += [f"note: {note}" for note in resumed.notes] if resumed else []
        self.resumed_at = resumed.step if resumed else 0
        return ckpt

    def stepped(self, ckpt: deltashard.Checkpointer) -> None:
        """Save or kill after `ckpt.step()`, if the step requires it."""
        if ckpt.steps == self.kill - 2:
            ckpt.save("user").wait(60)
        if ckpt.steps == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepping(self, loader: Any, ckpt: deltashard.Checkpointer) -> Iterator[Any]:
        """Yield the loader's batches to a library's own loop, with `step()` after the loop's body."""
        for batch in loader:
            yield batch
            ckpt.step()
            self.stepped(ckpt)


class ClickModel(nn.Module):
    """Two tables and a small network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (nn.EmbeddingBag(ROWS, 16, mode="sum") for _ in range(2))
        self.top = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def loss(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.cat([self.user(ids), self.item(ids * 7 % ROWS)], 1)
        return (self.top(found).squeeze(1) - y).square().mean()


def _clicks(samples: int = SAMPLES) -> TensorDataset:
    draws = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randint(ROWS, (samples, 4), generator=draws), torch.rand(samples, generator=draws)
    )


def _final_state(model: nn.Module, optimizer: Any, **more: Any) -> dict[str, bytes]:
    return bits("model", model.state_dict()) | optimizer_bits("optimizer", optimizer) | bits("more", more)


def lightning(process: LibraryProgramRun, *, manual: bool = False, workers: int = 0) -> dict[str, bytes]:
    """Train with Lightning's Trainer, validation and a schedule; a callback calls `Checkpointer.step()`."""
    import lightning as pl

    class LightningClickModel(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = ClickModel()
            self.automatic_optimization = not manual
            self.rule = torch.optim.Adagrad(self.parameters(), lr=0.05)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.rule, 6, 0.9)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.net.loss(*batch)
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
                self.lr_schedulers().step()
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", self.net.loss(*batch))

        def configure_optimizers(self) -> Any:
            return [self.rule], [{"scheduler": self.schedule, "interval": "step"}]

    class StepCallback(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            # Lightning validates after len(loader) batches, including those before the restart.
            nonlocal before
            trainer.fit_loop.epoch_loop.batch_progress.current.ready += before
            trainer.fit_loop._data_fetcher.fetched += before
            before = 0

        def on_train_batch_end(self, *_: Any) -> None:
            ckpt.step()
            process.stepped(ckpt)

    pl.seed_everything(3, workers=True, verbose=False)
    module = LightningClickModel()
    ckpt = process.checkpointer(module, module.rule, schedule=module.schedule)
    loader = ckpt.wrap(DataLoader(_clicks(), BATCH, shuffle=True, num_workers=workers))
    before = loader.delivered
    trainer = pl.Trainer(
        max_epochs=EPOCHS - loader.epoch, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[StepCallback()],
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(_clicks(24), BATCH))
    ckpt.close()
    return _final_state(module, module.rule, schedule=module.schedule.state_dict())


def lightning_manual(process: LibraryProgramRun) -> dict[str, bytes]:
    return lightning(process, manual=True, workers=2)


def accelerate(process: LibraryProgramRun, **loaders: Any) -> dict[str, bytes]:
    """Train with Accelerate's prepared objects; gradients of two batches are accumulated."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(**loaders)
    )
    set_seed(3)
    net = ClickModel()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.9)
    net, prepared, loader, prepared_schedule = accelerator.prepare(
        net, optimizer, DataLoader(_clicks(), BATCH, shuffle=True), schedule
    )
    accelerator_step = (lambda: accelerator.step, lambda n: setattr(accelerator, "step", n))
    ckpt = process.checkpointer(net, prepared, schedule=schedule, accelerator_step=accelerator_step)
    loader = ckpt.wrap(loader)
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net.loss(*batch))
                prepared.step()
                prepared_schedule.step()
                prepared.zero_grad()
            ckpt.step()
            process.stepped(ckpt)
    ckpt.close()
    return _final_state(net, optimizer, schedule=schedule.state_dict())


def accelerate_stateful(process: LibraryProgramRun) -> dict[str, bytes]:
    return accelerate(process, use_stateful_dataloader=True)


def accelerate_seedable(process: LibraryProgramRun) -> dict[str, bytes]:
    """Train with Accelerate's sampler, whose order is a function of seed and epoch."""
    return accelerate(process, use_seedable_sampler=True)


def torch_rechub(process: LibraryProgramRun) -> dict[str, bytes]:
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models.ranking import DeepFM
    from torch_rechub.trainers import CTRTrainer
    from torch_rechub.utils.data import DataGenerator

    _seed()
    draws = np.random.default_rng(5)
    sparse = [SparseFeature(name, vocab_size=ROWS, embed_dim=16) for name in ("user", "item")]
    dense = [DenseFeature("age")]
    x = {feature.name: draws.integers(0, ROWS, SAMPLES) for feature in sparse}
    x["age"] = draws.random(SAMPLES).astype("float32")
    y = draws.integers(0, 2, SAMPLES).astype("float32")
    model = DeepFM(
        deep_features=dense,
        fm_features=sparse,
        mlp_params={"dims": [16], "dropout": 0.2, "activation": "relu"},
    )
    trainer = CTRTrainer(model, optimizer_params={"lr": 1e-2, "weight_decay": 1e-5}, n_epoch=EPOCHS)
    loader, _, _ = DataGenerator(x, y).generate_dataloader(
        x_val=x, y_val=y, x_test=x, y_test=y, batch_size=BATCH
    )
    ckpt = process.checkpointer(model, trainer.optimizer)
    loader = ckpt.wrap(loader)
    for _ in range(loader.epoch, EPOCHS):
        trainer.train_one_epoch(process.stepping(loader, ckpt))
    ckpt.close()
    return _final_state(model, trainer.optimizer)


def recbole(process: LibraryProgramRun) -> dict[str, bytes]:
    """Train BPR with recbole's trainer, whose loader draws negative samples while it collates."""
    # recbole 1.2.1 uses these names of numpy 1.
    for name, value in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
        setattr(np, name, value)
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    data = process.store.parent / "data" / "tiny"
    data.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(5)
    pairs = sorted({(int(u), int(i)) for u, i in draws.integers(0, 40, (120, 2))})
    (data / "tiny.inter").write_text(
        "user_id:token\titem_id:token\n" + "".join(f"u{u}\ti{i}\n" for u, i in pairs)
    )
    config = Config(
        model="BPR", dataset="tiny",
        config_dict={
            "data_path": str(data.parent), "checkpoint_dir": str(process.store.parent / "saved"), "embedding_size": 16,
            "load_col": {"inter": ["user_id", "item_id"]}, "train_batch_size": BATCH, "epochs": EPOCHS, "worker": 0,
            "state": "ERROR", "show_progress": False, "use_gpu": False, "seed": 7, "reproducibility": True,
        },
    )  # fmt: skip
    init_seed(config["seed"], config["reproducibility"])
    os.chdir(process.store.parent)  # recbole's trainer writes log_tensorboard/
    train, _, _ = data_preparation(config, create_dataset(config))
    model = get_model(config["model"])(config, train._dataset)
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    ckpt = process.checkpointer(model, trainer.optimizer)
    loader = ckpt.wrap(train)
    for epoch in range(loader.epoch, EPOCHS):
        trainer._train_epoch(process.stepping(loader, ckpt), epoch)
    ckpt.close()
    return _final_state(model, trainer.optimizer)


PROGRAMS: dict[str, Callable[[LibraryProgramRun], dict[str, bytes]]] = {
    program.__name__: program
    for program in (lightning, lightning_manual, accelerate, accelerate_stateful, accelerate_seedable, torch_rechub, recbole)
}  # fmt: skip
IMPORTS = {
    "lightning": ("lightning",),
    "accelerate": ("accelerate", "torchdata.stateful_dataloader"),
    "torch": ("torch_rechub.models.ranking", "torch_rechub.trainers"),
    "recbole": ("recbole.data", "recbole.model.general_recommender", "recbole.trainer.trainer"),
}


def _seed() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)


def _forked(
    program: Callable[[LibraryProgramRun], dict[str, bytes]], process: LibraryProgramRun, out: Path
) -> int:
    pid = os.fork()
    if pid == 0:
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        found: dict[str, Any] = {"reported": process.reported, "bits": None}
        code = 1
        try:
            CapturedLog(process.reported)
            found["bits"] = program(process)
            code = 0
        except deltashard.errors.DeltashardError as error:
            traceback.print_exc()
            process.reported.append(f"error: {type(error).__name__}: {error}")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            found["resumed_at"] = getattr(process, "resumed_at", 0)
            out.write_bytes(pickle.dumps(found))
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(work: Path, name: str, kill: int) -> dict[str, int]:
    """Return the exit codes of a program's three processes; their results are in `WORK/{whole,resumed}`."""
    program = PROGRAMS[name]
    for module in IMPORTS[name.partition("_")[0]]:
        with contextlib.suppress(ImportError):
            __import__(module)
    for folder in ("a", "b"):
        (work / folder).mkdir(parents=True)
    return {
        "whole": _forked(program, LibraryProgramRun(work / "a" / "store"), work / "whole"),
        "killed": _forked(program, LibraryProgramRun(work / "b" / "store", kill), work / "killed"),
        "resumed": _forked(program, LibraryProgramRun(work / "b" / "store"), work / "resumed"),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for numpy_1, value in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
        setattr(np, numpy_1, value)
    __import__("torch._dynamo")
    work = Path(sys.argv[1])
    print(json.dumps({name: run(work / name, name, kill) for name, kill in json.loads(sys.argv[2]).items()}))


if __name__ == "__main__":
    main()
