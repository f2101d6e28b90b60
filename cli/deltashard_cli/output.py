"""Output of results: tables on stdout, one JSON document for programs, progress bars on a terminal's stderr.

All human-readable output passes through `console`, which escapes it by `escaped`: names and messages come from a store
that untrusted writers may have written, and a terminal executes escape sequences. Rich markup ("[red]") is plain text.
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
"""Minimum width of a column that may be folded, in characters."""
Advance = Callable[[int], None]
"""Callback that receives the number of bytes processed since the last call."""


def plain(value: Any) -> Any:
    """Return `value` as JSON types: dataclasses become dicts, tuples and sets lists, NaN and infinities strings."""
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
    """Escape unprintable characters as `repr` does: C0, C1, bidi and format characters, surrogates.

    `lines` keeps newlines. Text that is already escaped stays unchanged.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else repr(each)[1:-1] for each in text
    )


def warn(text: str) -> None:
    """Warn about damaged data on stderr and in the JSON document; the command then exits with 1."""
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
    """Print one document on stdout, with the key `warning` if there were warnings."""
    document = plain(value)
    context = click.get_current_context(silent=True)
    if context is not None and (warned := warnings(context)):
        document["warning"] = "; ".join(warned)
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
    """Redirect stdout to null after its reader has gone (`| head`), so that the command keeps its own exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr; 200 characters wide if it is not a terminal, to avoid truncated output."""
    found = _Console(stderr=stderr)
    return found if found.is_terminal else _Console(stderr=stderr, width=200)


class _Console(Console):
    """A console that escapes all text and ignores a closed pipe, so that the command keeps its own exit code."""

    def __init__(self, *, stderr: bool, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False)
        self.push_render_hook(_Escaping())

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(_cell(each) if isinstance(each, str) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_stdout()


class _Escaping(RenderHook):
    """Wraps everything a console prints in `_Escaped`; styles are not text yet and stay intact."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


class _Escaped:
    """A renderable whose text is escaped."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._shown, options):
            yield Segment(text if control else escaped(text, lines=True), style, control)


def _cell(value: object) -> Text:
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
    """Print a table without its empty columns.

    A column whose name begins with '>' is right-aligned; one whose name begins with '~' may be folded. If the terminal
    is too narrow, `droppable` columns are omitted in the given order, and the caption names them.
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
        caption += f"no room for {', '.join(dropped)}: use a wider terminal or --json"
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
    """Format bytes with a binary unit and about 3 significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def number(count: int) -> str:
    return f"{count:,}"


def age(at_s: float, now_s: float | None = None) -> str:
    """Format the time since `at_s` in the largest unit of which at least 2 have passed, else in seconds."""
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
    """Show a progress bar if stderr is a terminal."""
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
