"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def run_options(command: Command) -> Command:
    """URL, --run and --json."""
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
