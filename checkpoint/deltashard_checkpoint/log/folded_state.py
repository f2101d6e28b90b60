"""`log/fold-{seq}-{digest}.json`: the folded state up to a slot; the log need not be read from genesis.

Whoever appends an entry puts one of the state before it, now and then, and names it in that very entry: its slot and
the first 32 digits of the SHA-256 of its bytes. So it is as good as the log. Readers begin with the newest one that an
entry behind it names, whose bytes have that hash and after which the log can be followed to that entry; what became of
the entries before it, rot or loss, no longer matters. One that nothing names, or that does not fit, counts for nothing.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, TypeVar

from deltashard_checkpoint.errors import CorruptObject, ForeignObject, UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import Reader, canonical, content_digest
from deltashard_checkpoint.format.canonical_json import load as load_json
from deltashard_checkpoint.log.entry import Checkpoint, Compacted, Entry, FoldName, Sealed, is_prefix
from deltashard_checkpoint.log.entry_codec import document_of, parse
from deltashard_checkpoint.log.pin import UserEntry
from deltashard_checkpoint.log.run_state import Attempt, RunState

FORMAT = 1
_LAYOUT = re.compile(r"|[0-9a-f]{32}", re.ASCII)
_NAME = re.compile(r"log/fold-(\d{20})-([0-9a-f]{32})\.json", re.ASCII)
E = TypeVar("E", bound=Entry)


def fold_key(name: FoldName) -> str:
    """Key of a fold, relative to the run's root."""
    return f"log/fold-{name.seq:020d}-{name.digest}.json"


def fold_of(key: str) -> FoldName | None:
    """The fold that `key`, relative to the run's root, names; None for any other key."""
    match = _NAME.fullmatch(key)
    return FoldName(int(match[1]), match[2]) if match else None


def name_of(state: RunState, data: bytes) -> FoldName:
    """What the fold of `state`, with these bytes, is called."""
    return FoldName(state.tip, content_digest(data))


def dump(state: RunState) -> bytes:
    """`state` as bytes; only of a log that is not stopped."""
    assert state.stopped is None
    document = {
        "format": FORMAT,
        "run": state.run,
        "owner": state.owner,
        "tip": state.tip,
        "tip_hash": state.tip_hash,
        "attempt": state.attempt,
        "attempts": [_attempt_row(n, a) for n, a in sorted(state.attempts.items())],
        "checkpoints": [_sealed(c) for _, c in sorted(state.checkpoints.items())],
        "compactions": [_sealed(c) for _, c in sorted(state.compactions.items())],
        "superseded": [[prefix, seq] for prefix, seq in sorted(state.superseded.items())],
        "retired": [[prefix, seq] for prefix, seq in sorted(state.retired.items())],
        "compactions_from": state.compactions_from,
        "committed": state.committed,
        "keeps": state.keeps,
        "pins": [[name, *word] for name, word in sorted(state.words.items())],
        "aside": sorted(state.aside),
    }
    return canonical({**document, "hash": hashlib.sha256(canonical(document)).hexdigest()})


def _attempt_row(number: int, a: Attempt) -> list[Any]:
    resumed, last = (a.resumes_from, a.resumes_attempt), (a.last_cut, a.last_seq, a.last_step)
    return [number, a.world_size, *resumed, *last, a.workload, a.pod, a.layout]


def _sealed(entry: Entry) -> dict[str, Any]:
    document = document_of(entry)
    return {**document, "hash": hashlib.sha256(canonical(document)).hexdigest()}


def load(data: bytes, run: str, name: FoldName) -> RunState:
    """The state in `data`; raises `CorruptObject`, `UnsupportedVersion` or `ForeignObject` when it is not that fold."""
    where, seq = fold_key(name), name.seq
    if content_digest(data) != name.digest:
        raise CorruptObject("fold does not match the hash in its name", where=where)
    document = load_json(data, where)
    digest = document.pop("hash", None)
    if hashlib.sha256(canonical(document)).hexdigest() != digest:
        raise CorruptObject("fold does not match its own hash", where=where)
    r = Reader(document, where)
    if r.integer("format") != FORMAT:
        raise UnsupportedVersion("fold of another format", where=where)
    if r.text("run") != run or r.integer("tip") != seq:
        raise ForeignObject("fold of another run or slot", where=where)
    attempts = dict(_attempt(r, item) for item in r.items("attempts"))
    checkpoints = [_entry(r, item, Checkpoint) for item in r.items("checkpoints")]
    compactions = [_entry(r, item, Compacted) for item in r.items("compactions")]
    superseded, retired = _prefixes(r, "superseded"), _prefixes(r, "retired")
    if not all(is_prefix(prefix) for prefix in (*superseded, *retired)):
        r.fail("a prefix is neither a cut's nor a compaction's")
    words = {}
    for item in r.items("pins"):
        pin, slot, held = r.as_list(item, "pin", 3)
        words[r.as_text(pin, "pin")] = UserEntry(
            r.as_integer(slot, "pin"), None if held is None else r.as_integer(held, "pin")
        )
    state = RunState(
        run=run,
        owner=r.text("owner"),
        tip=seq,
        tip_hash=r.text("tip_hash"),
        attempt=r.nullable("attempt"),
        attempts=attempts,
        checkpoints={c.seq: c for c in checkpoints},
        compactions={c.replaces: c for c in compactions},
        superseded=superseded,
        retired=retired,
        compactions_from=r.integer("compactions_from"),
        committed=r.integer("committed"),
        keeps=r.nullable("keeps"),
        words=words,
        aside=frozenset(r.as_integer(item, "aside") for item in r.items("aside")),
    )
    r.end()
    if (why := _contradiction(state)) is not None:
        r.fail(why)
    return state


def _attempt(r: Reader, item: Any) -> tuple[int, Attempt]:
    """An attempt's number, and the attempt."""
    opened, size, *rest = r.as_list(item, "attempt", 10)
    resumes_from, resumes_attempt, last_cut, last_seq, last_step = (
        None if n is None else r.as_integer(n, "attempt") for n in rest[:5]
    )
    workload, pod, layout = rest[5:]
    return r.as_integer(opened, "attempt"), Attempt(
        world_size=r.as_integer(size, "attempt"),
        resumes_from=resumes_from,
        resumes_attempt=resumes_attempt,
        last_cut=last_cut,
        last_seq=last_seq,
        last_step=last_step,
        workload=r.as_text(workload, "attempt"),
        pod=r.as_text(pod, "attempt"),
        layout=r.as_text(layout, "attempt", _LAYOUT),
    )


def _contradiction(state: RunState) -> str | None:
    """What no log leads to, and what readers of a state rely on; None: nothing."""
    live = state.checkpoints
    if state.attempt is not None and state.attempt not in state.attempts:
        return "the newest attempt was never opened"
    for number, opened in state.attempts.items():
        resumed = (opened.resumes_from, opened.resumes_attempt)
        if any(seq is not None and seq >= number for seq in resumed):
            return "an attempt resumes from what came after it"
    if any(each.attempt not in state.attempts for each in live.values()):
        return "a checkpoint of an attempt that was never opened"
    if any(covers >= seq for seq, each in live.items() for covers in each.covered):
        return "a checkpoint covers what came after it"
    if not all(live.keys() >= set(c.covered) for seq, c in live.items() if seq not in state.compactions):
        return "a checkpoint covers one that is not live"
    said = {word.checkpoint for word in state.words.values()} - {None}
    if not live.keys() >= state.compactions.keys() | state.aside | said:
        return "it speaks of a checkpoint that is not live"
    return None


def _prefixes(r: Reader, key: str) -> dict[str, int]:
    found = {}
    for item in r.items(key):
        prefix, seq = r.as_list(item, key, 2)
        found[r.as_text(prefix, key)] = r.as_integer(seq, key)
    return found


def _entry(r: Reader, document: Any, kind: type[E]) -> E:
    seq = document.get("seq") if isinstance(document, dict) else None
    sealed: Sealed = parse(canonical(document), r.as_integer(seq, "seq"))
    if not isinstance(sealed.entry, kind):
        r.fail(f"{kind.__name__} expected")
    return sealed.entry
