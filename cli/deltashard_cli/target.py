"""Resolution of URLs on the command line: the root of a store, or a run in it.

`URL --run NAME`, `URL/NAME`, and a root with a single run all resolve to a run. A run is recognized by its first log
entry, which also holds the run's name (it may contain slashes). A plain path is a file store.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from urllib.parse import urlsplit

from deltashard_checkpoint.errors import DeltashardError, FormatError, UserError
from deltashard_checkpoint.format.canonical_json import load
from deltashard_checkpoint.format.object_key import run_key, validate_run
from deltashard_checkpoint.log.entry import entry_key, seq_of
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store
from deltashard_checkpoint.stores.retry import RetryPolicy
from deltashard_checkpoint.stores.url import local_path, open_store
from deltashard_checkpoint.whole_run.incomplete_state import incomplete_state, is_run_key

_INSIDE_RUN = re.compile(r"/(?:cache|closing|data|log|probe)/")
POLICY = RetryPolicy(deadline_s=15.0)
"""Short, because a user is waiting and can call the command again."""
MAX_OTHER_OBJECTS = 20_000
"""Limit of foreign objects that the search for a run's name reads: a directory may hold anything of any size."""
_NAMED = 20


class NoSuchRun(UserError):
    """The store holds no run of that name."""


class IncompleteRun(NoSuchRun):
    """An interrupted copy or removal has left objects under that name that are not a run."""


class TooManyOtherObjects(NoSuchRun):
    """The search for a run gave up after too many foreign objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run on an open store."""

    store: Store
    run: str


def open_root(url: str, *, create: bool = False) -> Store:
    """Open the store at `url`, a URL or a path; it must exist unless `create` makes its directory."""
    if "://" not in url:
        url = os.path.abspath(local_path(url))  # noqa: PTH100 - stays a string
    return open_store(url, policy=POLICY, create=create)


def new_run(url: str, run: str) -> Target:
    """Return the target of the new run `run`. Raises `UserError` if `url` is itself a run."""
    store = open_root(url, create=True)
    if _has_log(store, ""):
        raise UserError("this URL is a run, not a store", where=store.url, remedy="name the store above it")
    return Target(store=store, run=validate_run(run))


def find_run(url: str, run: str | None) -> Target:
    """Return the run that `url` and `--run` select.

    Raises:
        NoSuchRun: there is no such run, or the root has several and none is selected; the message lists them.
        IncompleteRun: an interrupted copy or removal has left objects that are not a run.
    """
    store = open_root(url)
    if run is not None:
        if _is_run(store, validate_run(run)):
            return Target(store=store, run=run)
        raise _unfinished(store, f"{run}/", run) or NoSuchRun(
            f"no run {run!r}", where=store.url, remedy=_suggestion(store)
        )
    if not _has_log(store, ""):
        try:
            return _only_run(store)
        except NoSuchRun as error:
            raise _unfinished(store, "", url) or error from None
    base, question, query = url.partition("?")
    base = base.rstrip("/")
    names = [name for name in _recorded_names(store) if f"{base}/".endswith(f"/{name}/")]
    name = names[0] if names else base.rpartition("/")[2]
    store.close()
    return Target(store=open_root(base[: -len(name)].rstrip("/") + question + query), run=name)


def _unfinished(store: Store, root: str, name: str) -> IncompleteRun | None:
    """Return the error for an incomplete run under `root`; None if there is nothing or a complete run."""
    if (found := incomplete_state(store, root)) is None:
        return None
    return IncompleteRun(f"{name} is not a run: {found}", where=store.url, remedy=found.remedy)


def _recorded_names(store: Store) -> Iterator[str]:
    """Yield the run's name as its first entry and its folded states record it; nothing if none can be read."""
    for key in (entry_key(0), *(info.key for info in store.list("log/fold-"))):
        with suppress(ObjectNotFound, FormatError):
            name = load(store.get(key), key).get("run")
            if isinstance(name, str):
                yield name


def must_exist(store: Store) -> None:
    """Raise `NoSuchRun` for an empty prefix of a bucket, as opening a missing directory does."""
    if (
        urlsplit(store.url).path.strip("/")
        and urlsplit(store.url).scheme not in {"file", "memory"}  # a bucket
        and next(store.list(""), None) is None
    ):
        raise NoSuchRun(
            "nothing is stored here",
            where=store.url,
            remedy="check the bucket, the prefix and the run's name",
        )


def url_names_run(url: str, run: str) -> bool:
    """Whether `url` itself contains the run's name, rather than only the store's."""
    base = url.partition("?")[0].rstrip("/")
    return f"{base}/".endswith(f"/{run}/") or base == run


def named_run(url: str, run: str | None) -> Target:
    """Return the run that `url` itself or `--run` names, for commands that cannot be undone.

    Raises `NoSuchRun` if the run is only implied, as the single run of a store.
    """
    target = find_run(url, run)
    if run is None and not url_names_run(url, target.run):
        raise NoSuchRun(
            "this URL is a store, not a run",
            where=target.store.url,
            remedy=f"confirm the run by --run {target.run}",
        )
    return target


def scanned_run(url: str, run: str | None) -> Target:
    """Like `find_run`, but also accepts a run that has data and no log: `url` is then the run's own URL."""
    try:
        return find_run(url, run)
    except NoSuchRun:
        found = run_of_url(url, run)
        if next(found.store.list(run_key(found.run, "data/")), None) is None:
            raise
        return found


def run_of_url(url: str, run: str | None = None) -> Target:
    """Return the run at `url`, whether or not it exists: `run`, or else the last segment of the URL, is its name."""
    base, question, query = url.partition("?")
    base = base.rstrip("/")
    name = validate_run(run or base.rpartition("/")[2])
    root = base if run else base[: -len(name)].rstrip("/")
    return Target(store=open_root(root + question + query), run=name)


def runs_of(store: Store, *, max_others: float = math.inf, unfinished: bool = False) -> Iterator[str]:
    """Yield the names of a store's runs in order, at one or two listing requests per run.

    `unfinished` includes incomplete runs (`IncompleteState`). Raises `TooManyOtherObjects` after `max_others` foreign
    objects.
    """
    after, others, more = "", 0, True
    none: set[str] = set()  # prefixes known not to be runs
    while more:
        more = False
        for found in store.list("", start_after=after):
            run = _run_of(store, found.key, none, unfinished=unfinished)
            if run is not None:
                yield run
                after, more = f"{run}/~", True  # sorts after every key of the run
                break
            others += 1
            if others >= max_others:
                raise TooManyOtherObjects(
                    f"{others:,} objects belong to no run; the search ended there",
                    where=store.url,
                    remedy="check the store URL, or name the run by --run",
                )


def _run_of(store: Store, key: str, none: set[str], *, unfinished: bool) -> str | None:
    """Return the run that an object belongs to; `none` caches prefixes that are not runs."""
    for match in _INSIDE_RUN.finditer(key):
        run = key[: match.start()]
        if run not in none:
            if _is_run(store, run):
                return run
            none.add(run)
        if unfinished and is_run_key(key[match.start() + 1 :]):
            return run
    return None


def _only_run(store: Store) -> Target:
    runs = list(islice(runs_of(store, max_others=MAX_OTHER_OBJECTS), 2))
    if len(runs) == 1:
        return Target(store=store, run=runs[0])
    what = "the store holds several runs" if runs else "the store holds no run"
    raise NoSuchRun(what, where=store.url, remedy=_suggestion(store) if runs else "check the store URL")


def _is_run(store: Store, run: str) -> bool:
    try:
        store.head(run_key(run, entry_key(0)))
    except ObjectNotFound:
        # A log without its first entry is a damaged run: its reader reports the gap.
        return _has_log(store, f"{run}/")
    return True


def _has_log(store: Store, root: str) -> bool:
    return any(seq_of(found.key[len(root) :]) is not None for found in store.list(f"{root}log/"))


def _suggestion(store: Store) -> str:
    found: list[str] = []
    with suppress(DeltashardError):  # this only extends the remedy of an error that is already known
        found.extend(islice(runs_of(store, max_others=MAX_OTHER_OBJECTS), _NAMED + 1))
    if not found:
        return "check the URL: no run was found there"
    return f"use --run with one of: {', '.join([*found[:_NAMED], *(['...'] if len(found) > _NAMED else [])])}"
