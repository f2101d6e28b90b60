"""Generates the reference pages in docs/reference from the code: `make reference`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from deltashard.attach import lifecycle as attach
from deltashard.restore import lifecycle as restore
from deltashard.save import lifecycle as snapshot
from deltashard_sidecar.save import lifecycle as save

from tools.reference_pages import errors, events, metrics, resources, settings

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "errors": errors.page,
    "events": events.page,
    "metrics": metrics.page,
    "resources": resources.page,
    "restore-lifecycle": restore.reference,
    "save-lifecycle": save.reference,
    "sidecar-settings": settings.page,
    "snapshot-lifecycle": snapshot.reference,
    "trainer-lifecycle": attach.reference,
}
"""Function that renders each generated page."""


def stale() -> list[str]:
    """Return a sentence for each page that differs from the code."""
    remedy = "is not what the code says: run `make reference`, and commit the page"
    return [
        f"docs/reference/{name}.md {remedy}"
        for name, render in PAGES.items()
        if not (path := FOLDER / f"{name}.md").exists() or path.read_text(encoding="utf-8") != render()
    ]


def main() -> None:
    for name, render in PAGES.items():
        (FOLDER / f"{name}.md").write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
