"""Arguments of `Checkpointer(...)` as a frozen record, checked before anything is started.

Every rejection names the argument, the accepted values and the remedy. Only values that would otherwise be accepted
silently, or fail far from their cause, are checked here, as are the arguments of `save()`. The sidecar checks the
values that it knows better (encodings, run names); `launcher` forwards its messages.
"""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from deltashard_checkpoint.deciding.goal import goal as goal_of
from deltashard_checkpoint.deciding.precision import format_encodings, match_tables
from deltashard_checkpoint.vocabulary import BITS_RULES, ENCODING_CHOICES
from torch import nn

from deltashard.errors import UserError
from deltashard.optimizer.optimizer_state import views_of
from deltashard.state.discovery import canonical_prefixes
from deltashard.state.value import unstorable_reason
from deltashard.tracking.tracking import TrackingSettings
from deltashard.tracking.user_optimizer import unwrap_optimizers

RESERVED = "deltashard/"
"""Reserved prefix of metadata names."""
MAX_METADATA = 60_000
"""Longest metadata of one save in characters, since every reader reads the log entries."""
_NAME = "1 to 200 printable characters without a space at an end"


_SAME_ON_ALL_RANKS = (
    "every_s", "every_steps", "goal", "encoding", "differential", "state_encoding", "keep_last", "arena_bytes",
    "metrics_port", "tables",
)  # fmt: skip
"""Arguments that are sidecar settings of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointConfig:
    """Arguments of `Checkpointer`, documented there, with the same names and defaults.

    Raises:
        UserError: An argument is invalid.
    """

    model: nn.Module
    optimizer: Any = ()
    """The list or mapping that was given, in which the script may replace an optimizer; otherwise a list."""
    state: Mapping[str, Any] | None = None
    url: str | os.PathLike[str] | None = None
    run: str | None = None
    every_s: float | None = None
    every_steps: int | None = None
    goal: str | None = None
    encoding: str | None = None
    differential: str | None = None
    state_encoding: str | None = None
    keep_last: int | None = None
    arena_bytes: int | None = None
    metrics_port: int | None = None
    sidecar: Mapping[str, object] | None = None
    fresh: bool = False
    validate: Callable[[], bool] | None = None
    bits: str | None = None
    tables: Mapping[str, str] | None = None
    content_hash: bool | None = None
    precopy: bool | None = None
    grace_s: float | Literal["auto"] | None = "auto"
    recovery: str = "full"
    pls_target: float | None = None
    planned_steps: int | None = None
    tracking: TrackingSettings | None = None
    on_event: Callable[[str, Mapping[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        check_model(self.model)
        for name, (holds, takes, remedy) in _CHECKS.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise _invalid_argument(name, value, takes, remedy)
        _check_goal(self.goal)
        _check_recovery(self)
        for name in (each for each in _SAME_ON_ALL_RANKS if each in (self.sidecar or {})):
            raise UserError(
                f"{name} is a separate argument", where="Checkpointer(sidecar=)", remedy=f"pass {name}="
            )
        handed = optimizers_of(self.optimizer, self.model)
        if not isinstance(self.optimizer, list | Mapping):
            object.__setattr__(self, "optimizer", handed)

    @property
    def partial(self) -> bool:
        return self.recovery == "partial"

    @property
    def content_hash_enabled(self) -> bool:
        if self.content_hash is None:
            return os.environ.get("DELTASHARD_CONTENT_HASH", "0") == "1"
        return self.content_hash

    @property
    def precopy_enabled(self) -> bool:
        return os.environ.get("DELTASHARD_PRECOPY", "1") != "0" if self.precopy is None else self.precopy

    @property
    def sidecar_settings(self) -> dict[str, object]:
        """Settings of a sidecar started for this run, by name; None keeps its default."""
        settings: dict[str, object] = {name: getattr(self, name) for name in _SAME_ON_ALL_RANKS}
        settings |= {"bits_goal": self.bits, "tables": format_encodings(self.tables) if self.tables else None}
        return settings | {"linger_s": 30.0} | dict(self.sidecar or {})

    def check_tables(self, known: Iterable[str]) -> None:
        """Raise `UserError` if `tables=` names a table that is not in `known`, the tables of the program."""
        names = sorted(known)
        _, unknown = match_tables(self.tables or {}, names)
        if unknown:
            near = difflib.get_close_matches(unknown[0], names, n=3, cutoff=0.3) or names[:3]
            raise UserError(
                f"{unknown[0]!r} is no table of the model",
                where="tables",
                remedy=f"such as {', '.join(map(repr, near))}" if near else "leave tables= out",
            )


def _invalid_argument(name: str, value: object, takes: str, remedy: str) -> UserError:
    shown = repr(value)
    if len(shown) > 80 or isinstance(value, nn.Module):
        shown = f"a {type(value).__name__}"
    return UserError(f"{name}= takes {takes}, not {shown}", where="Checkpointer()", remedy=remedy)


def check_model(model: object) -> None:
    """Raise `UserError` unless `model` is a module whose tensors have memory and can be stored."""
    if not isinstance(model, nn.Module):
        raise _invalid_argument("model", model, "a torch.nn.Module", "give the module that is trained")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise UserError(
                f"{name} is on the meta device, where nothing can be saved or restored",
                where="Checkpointer(model=)",
                remedy="give the model memory first, model.to_empty(device=...), then build its optimizers",
            )
    for path, module in canonical_prefixes(model):
        # The accessors would omit shared tensors; non-persistent buffers are not saved.
        transient = module._non_persistent_buffers_set  # noqa: SLF001
        buffers = [(name, b) for name, b in module._buffers.items() if name not in transient]  # noqa: SLF001
        for name, held in [*module._parameters.items(), *buffers]:  # noqa: SLF001
            if held is None or isinstance(
                held, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer
            ):
                continue
            if (why := unstorable_reason(held)) is not None:
                raise UserError(
                    f"{path}{'.' if path else ''}{name} {why}: it cannot be saved",
                    where="Checkpointer(model=)",
                    remedy="train without sharding, or keep the sharded part outside of the model"
                    if "sharded" in why
                    else "make it a plain dense tensor, or a buffer with persistent=False that is built again",
                )


def check_seconds(name: str, value: object, *, off: str) -> None:
    """Raise `UserError` unless `value` is None or a finite number of seconds, 0 or more."""
    if value is not None and not _is_seconds(value):
        raise _invalid_argument(name, value, _SECONDS, off)


def _is_seconds(value: Any) -> bool:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _is_count(value: Any, *, least: int) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_str_mapping(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _encodes_tables(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) and name for name in value)
        and all(encoding in ENCODING_CHOICES for encoding in value.values())
        and not any(sign in name for name in value for sign in ",=")
    )


_SECONDS = "seconds: a finite number, 0 or more"
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "state": (
        _is_str_mapping,
        "a dict of objects by name",
        'give names, for example state={"scheduler": scheduler}',
    ),
    "url": (
        lambda url: isinstance(url, os.PathLike) or (isinstance(url, str) and bool(url.strip())),
        "text or a path",
        'give "s3://bucket/prefix", "gs://...", "az://...", "file:///some/dir" or a directory',
    ),
    "run": (
        lambda run: isinstance(run, str) and bool(run.strip()),
        "text",
        'give the name of the training job, for example run="ads-ctr"',
    ),
    "sidecar": (
        _is_str_mapping,
        "a dict of settings by name",
        'for example sidecar={"cache_bytes": "4GiB"}',
    ),
    "every_s": (_is_seconds, _SECONDS, "leave every_s= out to save by steps or on demand only"),
    "grace_s": (
        lambda grace_s: grace_s == "auto" or _is_seconds(grace_s),
        f'"auto" or {_SECONDS}',
        "leave grace_s= out if in doubt; grace_s=None leaves SIGTERM alone",
    ),
    "every_steps": (
        lambda count: _is_count(count, least=0),
        "a whole number, 0 or more",
        "leave every_steps= out to save by time or on demand only",
    ),
    "keep_last": (
        lambda count: _is_count(count, least=1),
        "a whole number, 1 or more",
        "keep at least one checkpoint",
    ),
    "fresh": (_is_flag, "True or False", "leave fresh= out if in doubt"),
    "content_hash": (_is_flag, "True or False", "leave content_hash= out if in doubt"),
    "precopy": (_is_flag, "True or False", "leave precopy= out if in doubt"),
    "validate": (callable, "a function that returns a bool", "give the function itself, or leave it out"),
    "on_event": (callable, "a function of (name, facts)", "give the function itself, or leave it out"),
    "planned_steps": (
        lambda count: _is_count(count, least=1),
        "a whole number, 1 or more",
        "give the steps of the whole run",
    ),
    "bits": (
        lambda bits: bits in BITS_RULES,
        '"budget" or "check-n-run"',
        'encoding="q4" stores all tables with 4 bit; leave bits= out then',
    ),
    "tables": (
        _encodes_tables,
        "a dict of encodings by table",
        f'{{"emb.user": "q8"}}, with one of {", ".join(ENCODING_CHOICES)}',
    ),
}
"""By argument: check of a value other than None, accepted values, and remedy."""


def _check_goal(goal: object) -> None:
    if goal is None:
        return
    takes = "an objective for the save interval"
    if not isinstance(goal, str):
        raise _invalid_argument(
            "goal", goal, takes, 'use goal="auto" if in doubt; leave goal= out to use every_s='
        )
    try:
        goal_of(goal)
    except UserError as error:
        raise _invalid_argument("goal", goal, takes, error.remedy) from error


def _check_recovery(config: CheckpointConfig) -> None:
    recovery, planned_steps = config.recovery, config.planned_steps
    pls_target: object = config.pls_target
    if recovery not in ("full", "partial"):
        raise _invalid_argument(
            "recovery",
            recovery,
            '"full" or "partial"',
            'recovery="full" restores all ranks to one checkpoint, bit for bit; leave it out if in doubt',
        )
    if recovery == "full":
        if pls_target is not None:
            raise UserError(
                "pls_target= has no effect without partial recovery",
                where="Checkpointer()",
                remedy='leave pls_target= out, or pass recovery="partial", which is not exact',
            )
        return
    if pls_target is None or planned_steps is None:
        raise UserError(
            'recovery="partial" needs the share of samples that may be lost, and the number of steps',
            where="Checkpointer()",
            remedy="pls_target=0.02, planned_steps=100_000: at most 2 % of the samples of all rows",
        )
    if (
        isinstance(pls_target, bool)
        or not isinstance(pls_target, numbers.Real)
        or not 0 < float(pls_target) <= 1
    ):
        raise _invalid_argument(
            "pls_target", pls_target, "a share above 0, at most 1", "0.02 is 2 % of the samples of all rows"
        )
    if config.grace_s is None:
        raise UserError(
            'recovery="partial" needs a SIGTERM handler, which grace_s=None disables',
            where="Checkpointer()",
            remedy="leave grace_s= out",
        )


def check_pin(pin: object) -> None:
    """Raise `UserError` for a pin that `restore(which="pin:NAME")` or a command line cannot name."""
    if pin is not None and not _is_name(pin):
        raise UserError(
            f"pin= takes {_NAME}, not {_short_repr(pin)}", where="save()", remedy="choose another name"
        )


def stored_metadata(metadata: Mapping[Any, object] | None) -> dict[str, str]:
    """Return metadata as stored; raises `UserError` for reserved or invalid names, and for too much text."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UserError(
            f"metadata= takes a dict of texts by name, not a {type(metadata).__name__}",
            where="save()",
            remedy='for example metadata={"auc": auc}',
        )
    found = {str(name): str(value) for name, value in (metadata or {}).items()}
    for name, text in found.items():
        if name.startswith(RESERVED):
            raise UserError(
                f"metadata {name!r} begins with {RESERVED!r}", where="save()", remedy="choose another name"
            )
        if not _is_name(name):
            raise UserError(
                f"metadata= takes names of {_NAME}, not {_short_repr(name)}",
                where="save()",
                remedy="choose another name",
            )
        if len(text) > MAX_METADATA or not _is_text(text):
            raise UserError(
                f"metadata {name!r} has {len(text)} characters, or is not valid UTF-8",
                where="save()",
                remedy=f"store at most {MAX_METADATA} characters in total; put larger values into state=",
            )
    if (total := sum(len(name) + len(text) for name, text in found.items())) > MAX_METADATA:
        raise UserError(
            f"metadata has {total} characters in total",
            where="save()",
            remedy=f"at most {MAX_METADATA}: every reader of the log reads it; put larger values into state=",
        )
    return found


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and name == name.strip()


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True


def _short_repr(value: object) -> str:
    return (
        repr(value)
        if len(repr(value)) <= 80
        else f"a {type(value).__name__} of {len(repr(value))} characters"
    )


def optimizers_of(optimizer: Any, model: nn.Module) -> list[Any]:
    """Return the user's optimizers: one, several or none; wrappers are included, fused optimizers are not.

    Raises:
        UserError: A value is not an optimizer, steps no parameter of `model`, or was given twice.
    """
    remedy = "pass the optimizer that steps the model, or a list of them; schedulers belong in state="
    if optimizer is None:
        return []
    if isinstance(optimizer, Mapping):
        handed = list(optimizer.values())
    elif views_of([optimizer], {}, ()) or not isinstance(optimizer, Iterable) or isinstance(optimizer, str):
        handed = [optimizer]
    else:
        handed = list(optimizer)
    handed = unwrap_optimizers(handed)
    mine = set(model.parameters()) | {p for p in model.buffers() if p.requires_grad}
    for n, each in enumerate(handed):
        if any(each is earlier for earlier in handed[:n]):
            raise UserError(
                f"the {type(each).__name__} at position {n} was given before",
                where="Checkpointer(optimizer=)",
                remedy="pass each optimizer once",
            )
        views = views_of([each], {}, ())
        if not views or isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            raise _invalid_argument("optimizer", each, "torch optimizers", remedy)
        params = [p for view in views for group in view.target.param_groups for p in group["params"]]
        if mine.isdisjoint(params):
            raise UserError(
                f"none of the {len(params)} parameters of {type(each).__name__} belongs to the model",
                where="Checkpointer(optimizer=)",
                remedy="build the optimizer from this model's parameters, after the model was copied, converted or "
                "built again; parameters of another module need that module inside the model",
            )
    return handed
