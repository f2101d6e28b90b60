"""Arguments and options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
SPOOL_BYTES = 1 << 30
"""Of packs on their way."""


class Finite(click.FloatRange):
    """A number in a range; neither infinite nor NaN, which every range lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return found


def run_options(command: Command) -> Command:
    command = click.option(
        "--json", "as_json", is_flag=True, help="One JSON document on stdout, for programs."
    )(command)
    command = click.option("--run", metavar="NAME", help="The run, when URL is a store that holds several.")(
        command
    )
    return click.argument("url")(command)


def which_option(command: Command) -> Command:
    """--checkpoint, the newest by default."""
    return click.option(
        "--checkpoint",
        "-c",
        "which",
        default="latest",
        show_default=True,
        metavar="WHICH",
        help="latest, seq:N (or N), step:N or pin:NAME.",
    )(command)


def ended_option(command: Command) -> Command:
    """--ended: a person's word that no trainer of the run lives."""
    return click.option(
        "--ended",
        is_flag=True,
        help="You know that the run's trainer has ended, though its last save does not say so.",
    )(command)


def spool_option(command: Command) -> Command:
    """--spool: where packs wait on their way."""
    return click.option(
        "--spool",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        help="Directory for packs on their way, up to 1 GiB; default: the system's for temporary files.",
    )(command)
