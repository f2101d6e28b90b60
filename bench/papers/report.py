"""Writes the page of `make papers`: docs/papers.md with its pictures, and the figures behind it."""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

HEAD = """# The papers, measured

deltashard builds on four papers: Check-N-Run (Eisenman et al., NSDI 2022), CheckFreq (Mohan et al., FAST 2021), CPR
(Maeng et al., MLSys 2021) and Neo (Mudigere et al., ISCA 2022). This page compares their claims with measurements of
deltashard. `make papers` repeats all measurements and writes this page. [papers.json](measured/papers.json) contains
all figures, including the ones that this page leaves out. *The baskets* are the real shopping baskets of the demo (the
Online Retail data set). D is the number of columns of a row.
"""

LINE = 150
VERBATIM_PREFIXES = ("|", "#", "!", "    ")
"""Starts of blocks that are not wrapped."""


def write(found: Mapping[str, Any], parts: Mapping[str, ModuleType], docs: Path) -> Path:
    """Write page, pictures and figures under `docs`; return the page. `parts` are the modules in `found`, in order."""
    pictures = docs / "papers"
    pictures.mkdir(exist_ok=True)
    sections = []
    for name, part in parts.items():
        record = found["parts"][name]
        if "found" not in record:
            sections.append(f"## {name}\n\nThe measurement failed: `{record['error']}`")
            continue
        if hasattr(part, "plot"):
            with _style():
                part.plot(record["found"], pictures)
        sections.append(wrapped(part.page(record["found"]).strip()))
    page = docs / "papers.md"
    page.write_text(
        "\n".join([HEAD, headlines(found, parts), "", wrapped(measured(found)), "", *spaced(sections)])
    )
    (docs / "measured" / "papers.json").write_text(rows(found) + "\n")
    return page


def rows(value: Any, indent: str = "") -> str:
    """Return JSON with one line per row: an item of a list, and each object without nested objects."""
    whole = json.dumps(value)
    if "{" not in whole[1:]:
        return whole
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {rows(item, inner)}" for key, item in value.items()]
        return f"{{\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}}}"
    return f"[\n{inner}" + f",\n{inner}".join(map(json.dumps, value)) + f"\n{indent}]"


def measured(found: Mapping[str, Any]) -> str:
    on = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
    took = ", ".join(
        f"{name} {record['date']} ({record['took_s']:.0f} s)" for name, record in found["parts"].items()
    )
    return (
        f"Machine: {on['cores']} cores of {on['cpu']}, load average {on['load']} at the start, Python {on['python']}, "
        f"{versions}. Parts of the bench: {took}."
    )


def headlines(found: Mapping[str, Any], parts: Mapping[str, ModuleType]) -> str:
    lines = ["| Claim | Paper | deltashard | Result |", "|---|---|---|---|"]
    for name, part in parts.items():
        record = found["parts"][name]
        for row in part.headlines(record["found"]) if "found" in record else ():
            result = {True: "reached", False: "**not reached**", None: "not decided"}[row["met"]]
            result = "**partly reached**" if row.get("partly") else result
            result += "" if result == "reached" else f": {row['why']}"
            lines.append(f"| {row['what']} | {row['paper']} | {row['ours']} | {result} |")
    return "\n".join(lines)


def table(head: list[str], rows: list[list[str]]) -> str:
    first, *lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    return "\n".join([first, "|---" + "|---:" * (len(head) - 1) + "|", *lines])


def wrapped(text: str) -> str:
    """Wrap paragraphs and list items at `LINE` characters; tables, code and pictures are unchanged."""
    out, code = [], False
    for block in re.split(r"\n{2,}", text):
        fences = block.count("```")
        if code or fences or block.startswith(VERBATIM_PREFIXES):
            out.append(block)
            code ^= fences % 2 == 1
            continue
        items = re.split(r"\n(?=- )", block)
        out.append("\n".join(_filled(item) for item in items))
    return "\n\n".join(out)


def _filled(text: str) -> str:
    later = "  " if text.startswith("- ") else ""
    return textwrap.fill(
        " ".join(text.split()), LINE, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def spaced(sections: list[str]) -> list[str]:
    return [f"{section}\n" for section in sections]


@contextlib.contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: object) -> Iterator[Any]:
    """Yield axes; write the picture afterwards, without the date."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, **options)
    yield axes
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _style() -> Any:
    import matplotlib as mpl

    mpl.use("svg")
    return mpl.rc_context(
        {
            "svg.hashsalt": "papers",
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "figure.figsize": (7.5, 3.2),
            "figure.constrained_layout.use": True,
            "savefig.facecolor": "white",
        }
    )
