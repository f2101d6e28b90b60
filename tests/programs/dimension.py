"""The dimensions of user programs in one table: the first value of each is the simplest, and the default.

A program is a dict with one value for each dimension. `draw` returns a random program, `consistent` replaces
combinations that PyTorch refuses, and `differences` returns what a report shows.
"""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]

STEPS = 14
"""Steps of every program; an epoch has 5 batches, the last one is smaller."""

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    # the model
    "tables": (1, 2, 3),
    "rows": (60, 700, 6000),  # 6,000 rows of 16 are tracked by their gradients, fewer by hashes
    "width": (16, 4),
    "module": ("bag", "embedding"),
    "pooling": ("sum", "mean"),
    "sparse": (True, False),
    "dtype": ("float32", "float64", "float16"),
    "shared": (False, True),  # two modules, one weight
    "padding": (False, True),
    "max_norm": (False, True),
    "dropout": (False, True),
    "batch_norm": (False, True),
    "rarely_used": (False, True),  # the last table, in every third step
    # optimizers
    "table_rule": ("adagrad", "sgd", "momentum", "adam", "sparse_adam", "adamw", "rmsprop", "rowwise"),
    "dense_rule": ("adam", "sgd", "momentum", "adagrad", "adamw", "rmsprop"),
    "optimizers": ("two", "one", "each"),
    "groups": (1, 2),
    "wrapper": ("none", "lookahead"),
    "closure": (False, True),
    "scheduler": ("none", "step", "one_cycle", "plateau", "lambda"),
    "accumulate": (1, 2, 3),
    "clip": ("none", "norm", "value"),
    "scaler": (False, True),
    "zero_grad": ("none", "zeros", "after"),
    "ema": ("none", "averaged", "tensors"),
    "written": ("none", "clamp", "data"),  # weights written by the loop
    # changes in mid-run
    "freeze": ("none", "table", "dense", "unfreeze", "while"),
    "growth": ("none", "module", "parameter"),
    "replaced": ("none", "optimizer", "head", "group"),
    # the data
    "loader": (
        "map", "iterable", "buffer", "stateful", "stateful_iterable", "stateful_numpy", "resumable", "weighted", "numpy_sampler",
        "own_sampler", "batch_sampler", "distributed", "factory", "counting", "list",
    ),
    "workers": (0, 2),
    "persistent": (False, True),
    "shuffle": (True, False),
    "generator": (False, True),
    "augment": ("none", "torch", "numpy", "python", "attribute", "state", "hidden"),
    "batch": ("tuple", "dict", "object"),
    "skip": ("default", "replay"),
    # the loop
    "loop": (
        "for", "next", "enumerate", "epochs", "next_iter", "islice", "break", "break_used", "cycle", "kept",
        "two_steps", "filter", "pipelined", "pipelined_undeclared", "zip", "nested", "alternate", "generator",
    ),
    "between": ("none", "spare", "peek", "evaluate", "train_pass"),
    "loop_draws": ("none", "torch", "numpy"),
    "reseed": (False, True),  # at the start of each epoch
    "wrap_first": (False, True),
    # the checkpoints
    "save": ("every", "wait", "pin", "request", "each_step"),
    "differential": ("intermittent", "full", "consecutive", "one-shot"),
    "content_hash": (False, True),
    "precopy": (True, False),
    # the end, and the restart
    "kill": (8, 3, 5, 6, 7, 9, 10, 11, 13),
    "kill_where": ("step", "backward", "optimizers", "sigterm"),
    "second_kill": (0, 2, 4),  # steps after the restart
    "restart": ("same", "draws", "batch_size", "longer", "unshuffled", "workers", "rate"),
}  # fmt: skip

_PLAIN = {name: values[0] for name, values in DIMENSIONS.items()}
_DENSE_ONLY = ("adam", "adamw", "rmsprop")
_NO_WORKERS = ("counting", "list", "factory")
_TWO_LOADERS = ("zip", "nested", "alternate")


def draw(seed: int) -> Spec:
    """Draw a consistent program; some differ from the plain program in few dimensions, others in most."""
    chooser = random.Random(seed)
    odd = chooser.choice((0.1, 0.2, 0.35, 0.5))
    spec = {
        name: chooser.choice(values[1:]) if chooser.random() < odd else values[0]
        for name, values in DIMENSIONS.items()
    }
    spec["kill"] = chooser.choice(DIMENSIONS["kill"])
    return consistent(spec)


def with_defaults(differences: Spec) -> Spec:
    if unknown := differences.keys() - DIMENSIONS.keys():
        raise ValueError(f"no such dimension: {sorted(unknown)}")
    return consistent(_PLAIN | differences)


def differences(spec: Spec) -> Spec:
    return {name: value for name, value in spec.items() if value != _PLAIN[name]}


def consistent(spec: Spec) -> Spec:
    """Return the program without combinations that PyTorch refuses or that are impossible."""
    s = dict(spec)
    if s["table_rule"] in ("sparse_adam", "rowwise"):
        s["sparse"] = s["table_rule"] == "sparse_adam" or s["sparse"]
        s["optimizers"] = "two" if s["optimizers"] == "one" else s["optimizers"]
    if s["table_rule"] in _DENSE_ONLY or s["dtype"] == "float16" or s["max_norm"]:
        s["sparse"] = False
    if s["table_rule"] == "sparse_adam" and not s["sparse"]:
        s["table_rule"] = "adam"
    if s["dtype"] == "float16" and s["table_rule"] not in ("sgd", "momentum"):
        s["table_rule"] = "sgd"
    if s["dtype"] != "float32":
        s["scaler"], s["shared"] = False, False
    if s["optimizers"] != "one" or s["scaler"] or s["accumulate"] > 1 or s["clip"] != "none":
        s["closure"] = False
    if s["sparse"] and s["scaler"] and s["table_rule"] == "sparse_adam":
        s["scaler"] = False
    if s["loader"] in _NO_WORKERS or s["loop"] in _TWO_LOADERS:
        s["workers"] = 0
    if s["workers"] and "iterable" in s["loader"]:
        s["batch_norm"] = False  # a batch of one sample
    if not s["workers"]:
        s["persistent"] = False
    if s["loader"] in ("factory", "counting", "list"):
        s["augment"] = "none"
    if s["loader"] not in ("map", "stateful"):
        s["shuffle"], s["generator"] = True, False
    if s["loader"] == "batch_sampler" or s["loop"] in ("pipelined", "pipelined_undeclared"):
        s["between"] = s["between"] if s["between"] == "evaluate" else "none"
    if s["kill_where"] == "optimizers" and s["optimizers"] == "one":
        s["kill_where"] = "backward"
    if s["closure"] and s["kill_where"] == "backward":
        s["kill_where"] = "step"
    if s["restart"] in ("batch_size", "longer", "unshuffled", "workers") and s["loader"] not in (
        "map",
        "stateful",
    ):
        s["restart"] = "same"
    if s["restart"] == "workers" and s["loop"] in _TWO_LOADERS:
        s["restart"] = "same"
    if s["growth"] != "none":
        s["shared"], s["wrapper"], s["ema"] = False, "none", "none"
        s["freeze"] = s["freeze"] if s["freeze"] == "dense" else "none"
    if s["replaced"] != "none":
        s["wrapper"], s["scheduler"], s["optimizers"], s["ema"] = "none", "none", "two", "none"
    if s["tables"] == 1:
        s["rarely_used"] = False
    return s
