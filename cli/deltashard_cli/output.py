"""How results look: tables for people on stdout, one JSON document for programs, progress on a terminal's stderr.

Everything for people passes through a console of `console`, and all text in it through `escaped`: names and messages
come from a store that anybody may have written, and a terminal obeys what it reads. Markup of rich ("[red]") is text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_MIN_FOLDED_WIDTH = 28
"""A column that may be folded keeps at least this width."""
Advance = Callable[[int], None]
"""Called with bytes done."""


def plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses become objects, tuples and sets lists, NaN and infinities text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def escaped(text: str, *, lines: bool = False) -> str:
    """`text` with all that is not printable as `repr` has it: C0, C1, bidi and format characters, surrogates.

    `lines`: it is several lines, which stay so. What is escaped already stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else repr(each)[1:-1] for each in text
    )


def warn(text: str) -> None:
    """Say on stderr, and in the JSON document, that what was read is damaged; the command then ends with 1."""
    warnings(click.get_current_context()).append(text)
    note(text, label="warning", style="bold yellow")


def note(text: str, *, label: str = "", style: str = "") -> None:
    console(stderr=True).print(
        Text.assemble((f"{label}: " if label else "", style), escaped(text)), soft_wrap=True
    )


def warnings(context: click.Context) -> list[str]:
    found: list[str] = context.meta.setdefault("deltashard.warnings", [])
    return found


def print_json(value: Any) -> None:
    """One document on stdout; an object gets the key `warning` when there was one."""
    document = plain(value)
    context = click.get_current_context(silent=True)
    if context is not None and (said := warnings(context)):
        document["warning"] = "; ".join(said)
    try:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def print_result(text: str, *, as_json: bool, **document: object) -> None:
    if as_json:
        print_json(document)
    else:
        console().print(text)


def discard_stdout() -> None:
    """The reader of stdout has gone (`| head`): the command goes on to its own exit code, and says no more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def console(*, stderr: bool = False) -> Console:
    """Stdout or stderr for people; wide when it is no terminal, so that nothing is cut in files and pipes."""
    found = _Console(stderr=stderr)
    return found if found.is_terminal else _Console(stderr=stderr, width=200)


class _Console(Console):
    """A console that writes nothing raw, and whose command goes on, to its own exit code, when its reader has gone."""

    def __init__(self, *, stderr: bool, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False)
        self.push_render_hook(_Escaping())

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(_cell(each) if isinstance(each, str) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_stdout()


class _Escaping(RenderHook):
    """Whatever a console is given is escaped where it becomes text; the console's own colours are no text yet."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


class _Escaped:
    """Something to show, escaped."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._shown, options):
            yield Segment(text if control else escaped(text, lines=True), style, control)


def _cell(value: object) -> Text:
    """A value as one line; what a command has styled stays as it is."""
    return value if isinstance(value, Text) else Text(escaped(str(value)))


def show(
    out: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    caption: str = "",
    droppable: Sequence[str] = (),
) -> None:
    """Print a table; a column is right-aligned if its name begins with '>', may be folded if with '~'; empty ones go.

    Where the terminal is too narrow, `droppable` columns are left out, first named first, and the table says so.
    """
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = [
        max(len(column.lstrip(">~")), *(len(row[at]) for row in cells), 0)
        for at, column in enumerate(columns)
    ]
    for at, column in enumerate(columns):
        if column[0] == "~":
            widths[at] = min(widths[at], _MIN_FOLDED_WIDTH)
    kept = [at for at in range(len(columns)) if not rows or any(row[at] for row in cells)]
    dropped: list[str] = []
    for name in droppable:
        if sum(widths[at] + 2 for at in kept) - 2 <= out.width:
            break
        kept = [at for at in kept if columns[at].lstrip(">~") != name]
        dropped.append(name)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for at in kept:
        folds = columns[at][0] == "~"
        made.add_column(
            columns[at].lstrip(">~"),
            justify="right" if columns[at][0] == ">" else "left",
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
            min_width=widths[at],
        )
    for row in cells:
        made.add_row(*(row[at] for at in kept))
    if title:
        out.print(title, style="bold", soft_wrap=True)
    out.print(made)
    if dropped:
        caption = f"{caption}; " if caption else ""
        caption += f"no room for {', '.join(dropped)}: a wider terminal or --json has them"
    if caption:
        out.print(caption, style="dim")


def key_value_table(pairs: Sequence[tuple[str, object]]) -> Table:
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(_cell(name), _cell(value))
    return made


def size(count: float) -> str:
    """Bytes with a binary unit: 3 digits that matter."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def number(count: int) -> str:
    return f"{count:,}"


def age(at_s: float, now_s: float | None = None) -> str:
    """How long ago, in the largest unit that is at least 2 (or seconds)."""
    seconds = (time.time() if now_s is None else now_s) - at_s
    if seconds < 0:
        return "in the future"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))


def plural(count: int, noun: str, many: str | None = None) -> str:
    return f"{number(count)} {noun if count == 1 else many or noun + 's'}"


@contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Advance]:
    """A bar on stderr when that is a terminal; elsewhere nothing."""
    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda _count: None
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    ) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda count: bar.advance(task, count)
