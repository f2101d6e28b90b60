"""What a URL on the command line means: a store's root, or a run in it.

`URL --run NAME`, `URL/NAME`, and a root with a single run all lead to a run. A run is recognised by its first log
entry, which also knows the run's own (perhaps long) name. A plain path is a file store.
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
"""A person waits: whoever wants a store that is down for longer calls again."""
MAX_OTHER_OBJECTS = 20_000
"""Objects of no run that are looked through for the name of one: a directory may be of anything, and of any size."""
_NAMED = 20
"""Runs that a message lists."""


class NoSuchRun(UserError):
    """The store holds no run of that name."""


class IncompleteRun(NoSuchRun):
    """There is something of that name, and it is no run (any more, or yet)."""


class TooManyOtherObjects(NoSuchRun):
    """So many objects of no run that the others were not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run on an open store."""

    store: Store
    run: str


def open_root(url: str, *, create: bool = False) -> Store:
    """The store at `url`, which must exist unless `create` makes its directory; a path needs no scheme."""
    if "://" not in url:
        url = os.path.abspath(local_path(url))  # noqa: PTH100 - stays a string
    return open_store(url, policy=POLICY, create=create)


def new_run(url: str, run: str) -> Target:
    """Where the new run `run` will be. Raises `UserError` when `url` is a run itself, which holds no others."""
    store = open_root(url, create=True)
    if _has_log(store, ""):
        raise UserError("this is a run and not a store", where=store.url, remedy="name the store above it")
    return Target(store=store, run=validate_run(run))


def find_run(url: str, run: str | None) -> Target:
    """The run that `url` (and `--run`) mean.

    Raises:
        NoSuchRun: there is none, or the root has several and none was chosen; the message lists them.
        Unfinished: what a copy or a removal that was cut short has left.
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
    said = [name for name in _recorded_names(store) if f"{base}/".endswith(f"/{name}/")]
    name = said[0] if said else base.rpartition("/")[2]
    store.close()
    return Target(store=open_root(base[: -len(name)].rstrip("/") + question + query), run=name)


def _unfinished(store: Store, root: str, name: str) -> IncompleteRun | None:
    """The error of what is left under `root`; None: nothing is, or a whole run."""
    if (found := incomplete_state(store, root)) is None:
        return None
    return IncompleteRun(f"{name} is no run: {found}", where=store.url, remedy=found.remedy)


def _recorded_names(store: Store) -> Iterator[str]:
    """The run's own name, by its first entry, or by a folded state where that is lost; none where none can be read."""
    for key in (entry_key(0), *(info.key for info in store.list("log/fold-"))):
        with suppress(ObjectNotFound, FormatError):
            name = load(store.get(key), key).get("run")
            if isinstance(name, str):
                yield name


def must_exist(store: Store) -> None:
    """Raises `NoSuchRun` for a prefix of a bucket under which there is nothing, as a missing directory is refused."""
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
    """Whether `url` says the run's name, and not only the store's that it lies in."""
    said = url.partition("?")[0].rstrip("/")
    return f"{said}/".endswith(f"/{run}/") or said == run


def named_run(url: str, run: str | None) -> Target:
    """The run that `url` itself or `--run` names: never the only one of a store, for a command that is not taken back.

    Raises `NoSuchRun`.
    """
    target = find_run(url, run)
    if run is None and not url_names_run(url, target.run):
        raise NoSuchRun(
            "this is a store and not a run",
            where=target.store.url,
            remedy=f"say --run {target.run}, if you mean it",
        )
    return target


def scanned_run(url: str, run: str | None) -> Target:
    """Like `find_run`, also for what is left of a run without any log: `url` is then taken for the run's own."""
    try:
        return find_run(url, run)
    except NoSuchRun:
        found = run_of_url(url, run)
        if next(found.store.list(run_key(found.run, "data/")), None) is None:
            raise
        return found


def run_of_url(url: str, run: str | None = None) -> Target:
    """Where `url` would be a run, whether or not there is one: its last word is the name, unless that is said."""
    base, question, query = url.partition("?")
    base = base.rstrip("/")
    name = validate_run(run or base.rpartition("/")[2])
    root = base if run else base[: -len(name)].rstrip("/")
    return Target(store=open_root(root + question + query), run=name)


def runs_of(store: Store, *, max_others: float = math.inf, unfinished: bool = False) -> Iterator[str]:
    """Names of the runs on a store, in order; one listing request or two for each, and one for many other objects.

    `unfinished`: also of what has no log (`IncompleteState`), or not yet.
    Raises `TooManyOtherObjects` after `max_others` other objects.
    """
    after, others, more = "", 0, True
    none: set[str] = set()  # what might have been a run, and is not
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
                    f"{others:,} objects here are of no run, and no more were looked at",
                    where=store.url,
                    remedy="check the store URL, or say --run",
                )


def _run_of(store: Store, key: str, none: set[str], *, unfinished: bool) -> str | None:
    """The run that an object belongs to; what turns out to be none is kept in `none`, and not asked for again."""
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
    what = "which run? The store holds several" if runs else "no run here"
    raise NoSuchRun(what, where=store.url, remedy=_suggestion(store) if runs else "check the store URL")


def _is_run(store: Store, run: str) -> bool:
    try:
        store.head(run_key(run, entry_key(0)))
    except ObjectNotFound:
        # A log without its first entry is a damaged run, not none: its reader names the gap.
        return _has_log(store, f"{run}/")
    return True


def _has_log(store: Store, root: str) -> bool:
    return any(seq_of(found.key[len(root) :]) is not None for found in store.list(f"{root}log/"))


def _suggestion(store: Store) -> str:
    found: list[str] = []
    with suppress(DeltashardError):  # what is wrong is known already: this only helps
        found.extend(islice(runs_of(store, max_others=MAX_OTHER_OBJECTS), _NAMED + 1))
    if not found:
        return "check the URL: no run was found there"
    return f"use --run with one of: {', '.join([*found[:_NAMED], *(['...'] if len(found) > _NAMED else [])])}"
