"""The page on errors, causes and exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import deltashard
from deltashard import errors
from deltashard.attach import exit_code, term_signal
from deltashard.save.snapshot_gate import MESSAGE, REMEDY
from deltashard_checkpoint.errors import DeltashardError
from deltashard_cli import main as command_line
from deltashard_operator import main as operator_main
from deltashard_proto.block_reason import BlockReason
from deltashard_proto.cause import Cause
from deltashard_sidecar import main as sidecar_main

from tools.reference_pages.markdown import document, head, section, sentence, table
from tools.reference_pages.source import attribute_docs, raises

FAMILIES = (errors.UserError, errors.EnvironmentFault, errors.InternalBug)


def page() -> str:
    return document(_lines())


def _lines() -> Iterator[str]:
    yield from head(
        "Errors and exit codes",
        "For authors of training scripts, and for engineers who read logs, alerts and the status of jobs.",
        "trainer/deltashard/errors.py",
        "proto/deltashard_proto/cause.py",
    )
    yield from section(
        "## Errors",
        """
        Every error is a `deltashard.errors.DeltashardError`. Its text has `what` happened, `where`, and the
        `remedy`; these are attributes, too. `cause` is one of the [causes](#causes). The base class shows who can
        act.
        """,
    )
    yield from table(("base class", "meaning"), [(f"`{each.__name__}`", _doc(each)) for each in FAMILIES])
    raised = _raised_by()
    listed = {each for each in [*vars(errors).values(), *raised] if inspect.isclass(each)} - {*FAMILIES}
    for family in FAMILIES[:2]:
        yield from section(f"### {family.__name__}")
        found = sorted((each for each in listed if issubclass(each, family)), key=lambda each: each.__name__)
        rows = [(_name(each), _doc(each), "\n".join(raised.get(each, ()))) for each in found]
        yield from table(("error", "when", "raised by"), rows)
    yield from section(
        "## Causes",
        "A cause is in messages, in the key `cause` of log lines, and in the label `cause` of metrics.",
    )
    causes = [(f"`{Cause[name]}`", text) for name, text in attribute_docs(Cause).items()]
    yield from table(("cause", "meaning"), causes)
    yield from section(
        "## Reasons that block a save",
        """
        A due save that is not taken has one of these reasons: in `stats.skipped`, in `doctor()`, and in the warning
        `no save for N s`.
        """,
    )
    rows = [(f"`{each}`", sentence(MESSAGE[each]), sentence(REMEDY[each])) for each in BlockReason]
    yield from table(("reason", "meaning", "remedy"), rows)
    yield from section("## Exit codes")
    yield from section("### Training script")
    yield from _codes(
        [exit_code, term_signal],
        {"1": "Another uncaught exception. After `FencedError` a newer process of this run trains."},
    )
    yield from section("### deltashard-sidecar")
    failed = "`health`: the sidecar does not answer."
    yield from _codes([sidecar_main], {"0": "The sidecar stopped as requested.", "1": failed})
    yield from section("### deltashard and kubectl deltashard")
    codes = [line.strip().partition("  ") for line in command_line._EXIT_CODES.splitlines()]  # noqa: SLF001
    yield from _codes([], {code: sentence(text) for code, _, text in codes if code.isdecimal()})
    yield from section("### deltashard-webhook and deltashard-controller")
    yield from _codes([operator_main], {"0": "The program stopped as requested."})


def _raised_by() -> dict[type, list[str]]:
    """Return the public calls by the errors that their docstrings name."""
    found: dict[type, list[str]] = {}
    for name, function in _public_calls():
        for error in raises(function):
            kind = getattr(inspect.getmodule(function), error, None) or getattr(errors, error, None)
            if inspect.isclass(kind) and issubclass(kind, DeltashardError):
                found.setdefault(kind, []).append(f"`{name}()`")
    return found


def _public_calls() -> Iterator[tuple[str, Any]]:
    for name in deltashard.__all__:
        member = getattr(deltashard, name)
        if inspect.isfunction(member):
            yield name, member
        elif inspect.isclass(member):
            for method, function in vars(member).items():
                if inspect.isfunction(function) and (not method.startswith("_") or method == "__init__"):
                    yield (name if method == "__init__" else f"{name}.{method}"), function


def _name(kind: type) -> str:
    base, module = kind.__bases__[0], kind.__module__
    place = "" if hasattr(errors, kind.__name__) else f"\nin `{module}`"
    return f"`{kind.__name__}`{place}" + ("" if base in FAMILIES else f"\na `{base.__name__}`")


def _doc(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


def _codes(modules: Sequence[ModuleType], more: dict[str, str]) -> Iterator[str]:
    """Yield the table of the constants `EXIT_*` with their docstrings, and of `more` codes."""
    found = {
        str(int(getattr(module, name))): text
        for module in modules
        for name, text in attribute_docs(module).items()
        if name.startswith("EXIT_")
    }
    yield from table(("code", "meaning"), sorted({**found, **more}.items(), key=lambda each: int(each[0])))
