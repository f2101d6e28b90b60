"""Generates the values table of the chart's README.md and the descriptions in values.schema.json from values.yaml.

`--check` only compares.

A comment is right above its key. A map whose entries have comments is a section; any other value is a row. A value
without a comment is an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent.parent / "charts" / "deltashard"
BEGIN, END = "<!-- values -->\n", "<!-- end of values -->\n"


class ReadmeError(Exception):
    """A value has no comment, or the README has no place for the table."""


def comment_above(lines: list[str], line: int) -> str:
    """Return the comment right above a line (counted from 0), as one line."""
    texts: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        texts.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(texts)


def rows(node: yaml.MappingNode, lines: list[str], prefix: str = "") -> Iterator[str]:
    """Return a row of the table for every value below a map; raises `ReadmeError`."""
    for key, value in node.value:
        path = prefix + key.value
        meaning = comment_above(lines, key.start_mark.line).replace("|", "\\|")
        if not meaning:
            raise ReadmeError(f"values.yaml: {path} has no comment")
        entries = value.value if isinstance(value, yaml.MappingNode) and not value.flow_style else []
        if any(comment_above(lines, entry.start_mark.line) for entry, _ in entries):
            yield f"| **`{path}`** | | {meaning} |"
            yield from rows(value, lines, f"{path}.")
        else:
            default = json.dumps(yaml.safe_load(yaml.serialize(value)), ensure_ascii=False)
            yield f"| `{path}` | `{default}` | {meaning} |"


def render_readme(readme: str, values: str) -> str:
    """Return the README with the table of these values in its place; raises `ReadmeError`."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ReadmeError(f"README.md has no {BEGIN.strip()} with {END.strip()} after it")
    root = yaml.compose(values, Loader=yaml.SafeLoader)
    lines = ["| value | default | meaning |", "|---|---|---|", *rows(root, values.splitlines())]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}"


def with_descriptions(schema: str, values: str) -> str:
    """Return the schema with each value's comment as its description, for editors."""
    document = json.loads(schema)
    lines = values.splitlines()

    def describe(part: dict[str, Any], node: yaml.MappingNode) -> None:
        part = document["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        known = part.get("properties", {})
        for key, value in node.value:
            comment = comment_above(lines, key.start_mark.line)
            if key.value in known and comment:
                old = known[key.value]
                known[key.value] = {"description": comment} | old | {"description": comment}
                if isinstance(value, yaml.MappingNode):
                    describe(old, value)

    describe(document, yaml.compose(values, Loader=yaml.SafeLoader))
    return json.dumps(document, indent=2) + "\n"


def main() -> int:
    """Write README and schema, or with `--check` report whether they are up to date."""
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    for name, make in (("README.md", render_readme), ("values.schema.json", with_descriptions)):
        path = CHART / name
        before = path.read_text(encoding="utf-8")
        try:
            wanted = make(before, values)
        except ReadmeError as error:
            sys.stderr.write(f"tools/chart_readme.py: {error}\n")
            return 1
        if "--check" not in sys.argv[1:]:
            path.write_text(wanted, encoding="utf-8")
        elif wanted != before:
            sys.stderr.write(f"{path} is not what values.yaml says: run tools/chart_readme.py\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
