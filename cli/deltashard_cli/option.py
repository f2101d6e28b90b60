"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from deltashard_checkpoint.cache.pack_cache import PackCache

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


json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, for programs."
)
run_option = click.option("--run", metavar="NAME", help="The run, when URL is a store that holds several.")
which_option = click.option(
    "--checkpoint",
    "-c",
    "which",
    default="latest",
    show_default=True,
    metavar="WHICH",
    help="latest, seq:N (or N), step:N or pin:NAME.",
)
named_option = click.option(
    "--checkpoint", "-c", "which", required=True, metavar="WHICH", help="seq:N (or N), step:N or pin:NAME."
)
spool_option = click.option(
    "--spool",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory for packs on their way, up to 1 GiB; default: the system's for temporary files.",
)
ended_option = click.option(
    "--ended",
    is_flag=True,
    help="You know that the run's trainer has ended, though its last save does not say so.",
)


def run_options(command: Command) -> Command:
    """URL, --run and --json."""
    return click.argument("url")(run_option(json_option(command)))


@contextmanager
def spool_cache(spool: Path | None) -> Iterator[PackCache]:
    """A cache for packs on their way, which goes with the command."""
    with (
        tempfile.TemporaryDirectory(prefix="deltashard-", dir=spool) as directory,
        PackCache(Path(directory), budget_bytes=SPOOL_BYTES) as cache,
    ):
        yield cache
