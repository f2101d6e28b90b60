"""Manifests: the parts of a checkpoint of many ranks, in an object next to them that the log entry names.

    data/{attempt:020d}/{snapshot_id:08d}/{hash}.manifest        hash: the first 32 digits of the SHA-256 of its bytes

Canonical JSON. Per rank: token and hash of the index, `covers`, rows, bytes; plus the ranks whose parts hold blobs
common to all. The layout defines their boxes. The entry itself has the parts' `covers`, and all parts are under the
snapshot's prefix, so the log is read and validated without manifests. Readers of rows use `Manifests` to load them into
`RunState.listings`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from deltashard_checkpoint.errors import CorruptObject, FormatError, InvalidCheckpoint, UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import Reader, canonical, content_digest, load
from deltashard_checkpoint.format.index import ROWS_AND_BLOBS
from deltashard_checkpoint.format.layout import Layout, layout_key
from deltashard_checkpoint.format.object_key import TOKEN_PATTERN, run_key, snapshot_prefix
from deltashard_checkpoint.format.record_codec import INTEGER, TEXT, document, text, values
from deltashard_checkpoint.log.entry import Checkpoint, ManifestRef, sorted_covers
from deltashard_checkpoint.log.part_list import ListedPart, PartList
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store

FORMAT = 1
T = TypeVar("T")
_TOKEN = re.compile(TOKEN_PATTERN, re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_HEADER = {"run": TEXT, "attempt": INTEGER, "snapshot_id": INTEGER, "step": INTEGER, "layout": text(_DIGEST)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The parts of one checkpoint, rank 0 first."""

    run: str
    attempt: int
    snapshot_id: int
    step: int
    layout: str
    """Digest of their layout."""
    parts: tuple[ListedPart, ...]

    @property
    def data(self) -> bytes:
        blobs = [rank for rank, part in enumerate(self.parts) if part.common_blobs]
        return canonical(
            {
                "format": FORMAT,
                "kind": ROWS_AND_BLOBS,
                **document(self, _HEADER),
                "parts": [[p.token, p.xxh3, p.covers, p.rows, p.stored_bytes] for p in self.parts],
                "blobs": blobs,
            }
        )

    @property
    def listed(self) -> ManifestRef:
        return ManifestRef(
            layout=self.layout,
            world_size=len(self.parts),
            manifest=content_digest(self.data),
            covers=sorted_covers(part.covers for part in self.parts),
        )

    @classmethod
    def decode(cls, data: bytes, *, digest: str) -> Manifest:
        """Decode a manifest named `digest`; raises `CorruptObject` or `UnsupportedVersion`."""
        where = f"manifest {digest}"
        if content_digest(data) != digest:
            raise CorruptObject("a manifest does not match the hash in its name", where=where)
        r = Reader(load(data, where), where)
        if r.integer("format") != FORMAT:
            raise UnsupportedVersion("manifest of another format", where=where, remedy="upgrade deltashard")
        if (kind := r.text("kind")) != ROWS_AND_BLOBS:
            raise UnsupportedVersion(f"parts of kind {kind[:40]!r}", where=where, remedy="upgrade deltashard")
        parts = list(r.items("parts"))
        blobs = [r.as_integer(item, "rank") for item in r.items("blobs")]
        if blobs != sorted(set(blobs)) or any(rank >= len(parts) for rank in blobs):
            raise CorruptObject("ranks with blobs are out of order, or out of range", where=where)
        common = frozenset(blobs)
        found = cls(
            **values(r, _HEADER),
            parts=tuple(_part(r, item, rank in common) for rank, item in enumerate(parts)),
        )
        r.end()
        return found


def manifest_key(attempt: int, snapshot_id: int, digest: str) -> str:
    return f"{snapshot_prefix(attempt, snapshot_id)}{digest}.manifest"


def _part(r: Reader, item: Any, common_blobs: bool) -> ListedPart:
    token, xxh3, covers, rows, stored_bytes = r.as_list(item, "part", 5)
    return ListedPart(
        token=r.as_text(token, "token", _TOKEN),
        xxh3=r.as_text(xxh3, "xxh3", _DIGEST),
        covers=None if covers is None else r.as_integer(covers, "covers"),
        rows=r.as_integer(rows, "rows"),
        stored_bytes=r.as_integer(stored_bytes, "stored_bytes"),
        common_blobs=common_blobs,
    )


class Manifests:
    """Reads and caches the manifests and layouts of one run. Thread-safe: concurrent readers wait for one read."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._lock = threading.Lock()  # guards the caches; never held during a store request
        self._read_lock = threading.RLock()
        """Serialises reads: the ranks of a pod want the same objects at once, and a layout may be 100 MB."""
        self._layouts: dict[str, Layout] = {}
        self._parts: dict[str, PartList] = {}

    def layout(self, digest: str) -> Layout:
        """Return the layout named `digest`; raises `InvalidCheckpoint` if bad or missing, and `StoreUnavailable`."""
        with self._read_lock:
            with self._lock:
                found = self._layouts.get(digest)
            if found is None:
                found = self._read(layout_key(digest), lambda data: Layout.decode(data, digest=digest))
                with self._lock:
                    self._layouts[digest] = found
        return found

    def parts(self, entry: Checkpoint) -> PartList:
        """Return the parts of a checkpoint that lists them in a manifest (`entry.listed`).

        Raises `InvalidCheckpoint` if the manifest or layout is bad or missing, and `StoreUnavailable`.
        """
        listed = entry.listed
        assert listed is not None
        with self._read_lock:
            with self._lock:
                found = self._parts.get(listed.manifest)
            if found is None:
                found = self._parts_of(entry, listed)
                with self._lock:
                    self._parts[listed.manifest] = found
        return found

    def _parts_of(self, entry: Checkpoint, listed: ManifestRef) -> PartList:
        key = manifest_key(entry.attempt, entry.snapshot_id, listed.manifest)
        manifest = self._read(key, lambda data: Manifest.decode(data, digest=listed.manifest))
        content = (manifest.run, manifest.attempt, manifest.snapshot_id, manifest.step, manifest.listed)
        if content != (self._run, entry.attempt, entry.snapshot_id, entry.step, listed):
            raise InvalidCheckpoint(
                "a manifest is not that of the entry which names it", where=run_key(self._run, key)
            )
        layout = self.layout(listed.layout)
        if layout.world_size != listed.world_size:
            raise InvalidCheckpoint(
                f"{listed.world_size} parts in a layout of {layout.world_size} ranks",
                where=run_key(self._run, key),
            )
        return PartList(
            attempt=entry.attempt, snapshot_id=entry.snapshot_id, listed=manifest.parts, layout=layout
        )

    def listing(self, state: RunState, seqs: Iterable[int]) -> RunState:
        """Return `state` with the parts of `seqs` loaded where a manifest lists them; raises the errors of `parts`."""
        absent = [
            seq
            for seq in seqs
            if seq in state.checkpoints
            and seq not in state.compactions
            and seq not in state.listings
            and state.checkpoints[seq].listed is not None
        ]
        if not absent:
            return state
        found = {seq: self.parts(state.checkpoints[seq]) for seq in absent}
        self._forget(state)
        return replace(state, listings={**state.listings, **found})

    def _forget(self, state: RunState) -> None:
        """Drop cached objects that no live checkpoint references."""
        live = [entry.listed for entry in state.checkpoints.values() if entry.listed is not None]
        manifests, layouts = {listed.manifest for listed in live}, {listed.layout for listed in live}
        with self._lock:
            self._parts = {name: held for name, held in self._parts.items() if name in manifests}
            self._layouts = {name: held for name, held in self._layouts.items() if name in layouts}

    def _read(self, key: str, decode: Callable[[bytes], T]) -> T:
        """Read an object named by its hash; wrong bytes are read again once before `InvalidCheckpoint` is raised."""
        where = run_key(self._run, key)
        for last in (False, True):
            try:
                return decode(self._store.get(where))
            except UnsupportedVersion:
                raise
            except ObjectNotFound as error:
                raise InvalidCheckpoint(f"{key} does not exist", where=where) from error
            except FormatError as error:
                if last:
                    raise InvalidCheckpoint(f"{key} cannot be read: {error}", where=where) from error
        raise AssertionError
