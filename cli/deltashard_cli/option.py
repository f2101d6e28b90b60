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


class Finite(click.FloatRange):
    """A finite number in a range: `click.FloatRange` accepts NaN and infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
run_option = click.option("--run", metavar="NAME", help="The run, if URL is a store with several runs.")
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
    help="Directory for up to 1 GiB of packs in transit; default: the system's temporary directory.",
)
ended_option = click.option(
    "--ended",
    is_flag=True,
    help="Assert that the run's trainer has ended although its last save does not record it.",
)


def run_options(command: Command) -> Command:
    return click.argument("url")(run_option(json_option(command)))


@contextmanager
def spool_cache(spool: Path | None) -> Iterator[PackCache]:
    """Yield a cache for packs in transit, in a temporary directory that is removed at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="deltashard-", dir=spool) as directory,
        PackCache(Path(directory), budget_bytes=SPOOL_BYTES) as cache,
    ):
        yield cache
