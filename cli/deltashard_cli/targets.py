"""What a URL on the command line means: a store's root, or a run in it.

`URL --run NAME`, `URL/NAME`, and a root with a single run all lead to a run. A run is recognised by its first log
entry, which also knows the run's own (perhaps long) name. A plain path is a file store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from deltashard_checkpoint.documents import parse
from deltashard_checkpoint.entries import Genesis, entry_key, seq_of
from deltashard_checkpoint.errors import FormatError, UserError
from deltashard_checkpoint.keys import run_key, validate_run
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store
from deltashard_checkpoint.stores.retries import RetryPolicy
from deltashard_checkpoint.stores.urls import open_store

_INSIDE_RUN = re.compile(r"/(?:cache|closing|data|log|probe)/")
POLICY = RetryPolicy(deadline_s=15.0)
"""A person waits: whoever wants a store that is down for longer calls again."""


class NoSuchRun(UserError):
    """The store holds no run of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run on an open store."""

    store: Store
    run: str


def open_root(url: str) -> Store:
    """The store at `url`, which must exist; a path needs no scheme."""
    if "://" not in url:
        url = os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111 - stays a string
    return open_store(url, policy=POLICY, create=False)


def find_run(url: str, run: str | None) -> Target:
    """The run that `url` (and `--run`) mean.

    Raises:
        NoSuchRun: there is none, or the root has several and none was chosen; the message lists them.
    """
    store = open_root(url)
    if run is not None:
        if _is_run(store, validate_run(run)):
            return Target(store=store, run=run)
        raise NoSuchRun(f"no run {run!r}", where=store.url, remedy=_known(store))
    first = b""
    try:
        first = store.get(entry_key(0))
    except ObjectNotFound:
        if not _has_log(store, ""):
            return _only_run(store)
    store.close()
    base, question, query = url.partition("?")
    base = base.rstrip("/")
    name = base.rpartition("/")[2]
    try:
        entry = parse(first, 0).entry
        if isinstance(entry, Genesis) and f"{base}/".endswith(f"/{entry.run}/"):
            name = entry.run
    except FormatError:
        pass  # the log's reader will say so, with more to say
    return Target(store=open_root(base[: -len(name)].rstrip("/") + question + query), run=name)


def must_exist(store: Store) -> None:
    """Raises `NoSuchRun` for a prefix of a bucket under which there is nothing, as a missing directory is refused."""
    if (
        urlsplit(store.url).path.strip("/")
        and store.url.startswith("s3:")
        and next(store.list(""), None) is None
    ):
        raise NoSuchRun(
            "nothing is stored here",
            where=store.url,
            remedy="check the bucket, the prefix and the run's name",
        )


def runs_of(store: Store) -> Iterator[str]:
    """Names of the runs on a store, in order; one listing request or two for each."""
    after = ""
    while (found := next(store.list("", start_after=after), None)) is not None:
        after = found.key
        for match in _INSIDE_RUN.finditer(found.key):
            run = found.key[: match.start()]
            if _is_run(store, run):
                yield run
                after = f"{run}/~"  # sorts after every key of the run
                break


def _only_run(store: Store) -> Target:
    runs = []
    for run in runs_of(store):
        runs.append(run)
        if len(runs) > 1:
            break
    if len(runs) == 1:
        return Target(store=store, run=runs[0])
    what = "which run? The store holds several" if runs else "no run here"
    raise NoSuchRun(what, where=store.url, remedy=_known(store) if runs else "check the store URL")


def _is_run(store: Store, run: str) -> bool:
    try:
        store.head(run_key(run, entry_key(0)))
    except ObjectNotFound:
        # A log without its first entry is a damaged run, not none: its reader names the gap.
        return _has_log(store, f"{run}/")
    return True


def _has_log(store: Store, root: str) -> bool:
    return any(seq_of(found.key[len(root) :]) is not None for found in store.list(f"{root}log/"))


def _known(store: Store) -> str:
    runs = []
    for run in runs_of(store):
        runs.append(run)
        if len(runs) == 20:
            runs.append("...")
            break
    return f"use --run with one of: {', '.join(runs)}" if runs else "the store holds no run at all"
