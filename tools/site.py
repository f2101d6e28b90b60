"""Hooks of mkdocs.yml: the README is the site's front page, and links to files outside docs/ point to the repository.

A link whose target does not exist is a warning, which `make docs` turns into an error.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r'(\]\(|<img src="|href=")(?![a-z]+:|#)([^)#"\s]+)')
log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: Any) -> Any:
    """List the runbooks where the navigation has the word RUNBOOKS."""
    runbooks = sorted((ROOT / "docs/kubernetes/runbooks").glob("*.md"))

    def filled(entry: Any) -> Any:
        if isinstance(entry, list):
            return [filled(each) for each in entry]
        if isinstance(entry, dict):
            return {title: filled(each) for title, each in entry.items()}
        return [str(page.relative_to(ROOT / "docs")) for page in runbooks] if entry == "RUNBOOKS" else entry

    config.nav = filled(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the README as index.md."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point each relative link at a page of the site or at a file of the repository."""
    here = ROOT if page.file.src_uri == "index.md" else (ROOT / "docs" / page.file.src_uri).parent

    def rewritten(match: re.Match[str]) -> str:
        opening, target = match.groups()
        to = (here / target).resolve()
        if not to.is_relative_to(ROOT) or not to.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
            return match[0]
        if to.is_dir() and (to / "README.md").exists():
            to /= "README.md"
        path = to.relative_to(ROOT).as_posix()
        if path == "README.md":
            path = "docs/index.md"
        site = path.removeprefix("docs/")
        page_of_site = files.get_file_from_path(site)
        if path.startswith("docs/") and page_of_site is not None and page_of_site.inclusion.is_included():
            up = "../" * page.file.src_uri.count("/")
            return f"{opening}{up}{site}"
        return f"{opening}{config.repo_url.rstrip('/')}/{'tree' if to.is_dir() else 'blob'}/main/{path}"

    return LINK.sub(rewritten, markdown)
