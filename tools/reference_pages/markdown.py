"""Markdown of the generated pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator


def head(title: str, audience: str, *sources: str) -> Iterator[str]:
    """Yield the title and the first paragraph: `audience` is a sentence about the page's readers."""
    *most, last = [f"`{source}`" for source in sources]
    made = f"{', '.join(most)} and {last}" if most else last
    yield from section(f"# {title}", f"{audience} Generated from {made} by `make reference`; do not edit.")


def section(heading: str, text: str = "") -> Iterator[str]:
    """Yield a heading and the paragraphs of `text`, which empty lines separate."""
    yield from (heading, "")
    for paragraph in filter(None, textwrap.dedent(text).strip().split("\n\n")):
        yield textwrap.fill(paragraph, 130, break_long_words=False, break_on_hyphens=False)
        yield ""


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a table and an empty line. A newline in a cell becomes a line break."""
    for cells in (header, ("---",) * len(tuple(header)), *rows):
        yield f"| {' | '.join(_cell(each) for each in cells)} |"
    yield ""


def document(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


def sentence(text: str) -> str:
    """Return the text on one line, with a capital letter and a period, unless it begins or ends with code."""
    text = re.sub(r"^[a-z](?=[a-z]* )", lambda first: first[0].upper(), " ".join(text.split()))
    return text if not text or text.endswith((".", ":", "*")) else f"{text}."


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("\n", "<br>")
