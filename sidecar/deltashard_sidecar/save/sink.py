"""Sink of one save's batches: encodes them into frames, spools the frames into packs, uploads and commits.

Each encoding thread reuses one buffer, so encoding needs the memory of one frame and its tail per thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from deltashard_checkpoint.deciding import cost, error_ledger
from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.format.frame_encoder import (
    encode_blob,
    encode_row_frames,
    frame_bound,
    rows_per_frame,
)
from deltashard_checkpoint.format.row_block import EncodeOptions
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.log.log_error import LogRemoved
from deltashard_checkpoint.vocabulary import (
    INCREMENTS_KEY,
    ORDERS_KEY,
    PLS_KEY,
    PRECISION_KEY,
    encoding_named,
)
from deltashard_checkpoint.write.commit import Committed, commit_parts
from deltashard_checkpoint.write.part_writer import PartTarget, PartWriter
from deltashard_checkpoint.write.report import PartReport
from deltashard_checkpoint.write.snapshot_reports import abandon_part
from deltashard_proto.arena_layout import MAX_FRAME_BYTES
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.arena.batch import BadBatch, Rows
from deltashard_sidecar.policy import KEY
from deltashard_sidecar.run.run import Run, commit_message
from deltashard_sidecar.run.snapshot_content import SnapshotContent
from deltashard_sidecar.save.joint_commit import JointCommits
from deltashard_sidecar.session.attachment import Attachment

ABANDON_DEADLINE_S = 10.0
"""For reporting to peers that a part will not arrive."""

PERIODIC = ("timer", "steps", "baseline")
"""Reasons of saves that nothing waits for: their commit may be noticed some seconds late."""
UPLOADS = 4

_buffers = threading.local()


def _buffer(size: int) -> memoryview:
    held: bytearray | None = getattr(_buffers, "held", None)
    if held is None or len(held) < size:
        held = bytearray(size)
        if size <= MAX_FRAME_BYTES + (1 << 20):  # a rare larger bound is not worth keeping
            _buffers.held = held
    return memoryview(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecisions:
    """Parameters of one save, decided at its begin."""

    attempt: int
    snapshot_id: int
    step: int
    reason: str
    urgent: bool
    content: SnapshotContent
    stall_budget_s: float
    deadline_s: float
    """From begin to committed."""
    layout: str = ""
    """Digest of the attempt's layout; empty: no layout."""
    samples: bool = False
    """Whether to measure and record the errors of this save's rows at fewer bits, because bits are chosen."""
    directive_text: str | None = None
    since: int | None = None
    """Seq of the trainer's newest commit if rows changed since then are sent separately from the others."""
    orders: tuple[fleet.SaveOrder, ...] = ()
    profile: str | None = None
    """Measurements and decisions of this sidecar, recorded with the commit."""


class PartSink:
    """Encodes, uploads and commits the part of one save."""

    def __init__(
        self,
        run: Run,
        attachment: Attachment,
        snapshot: SaveDecisions,
        *,
        joint: JointCommits,
        expected: Callable[[], AbstractSet[int]],
    ) -> None:
        """`expected` gives the ranks of this pod whose parts `joint` waits for."""
        self._run = run
        self._attachment = attachment
        self._plan = snapshot
        self._joint = joint
        self._expected = expected
        self._begun_s = time.monotonic()
        self._single_rank = attachment.world_size == 1
        self._log = run.log_of(attachment)
        if snapshot.content.covers is None:
            run.bits.errors.begin_baseline()
        self._writer = PartWriter(
            run.store,
            PartTarget(
                run=self._log.run,
                attempt=snapshot.attempt,
                snapshot_id=snapshot.snapshot_id,
                step=snapshot.step,
                rank=attachment.rank,
                token=run.token,
                tables=attachment.tables,
                boxes=attachment.boxes,
                covers=snapshot.content.covers,
            ),
            run.cache,
            pack_bytes=run.settings.pack_bytes,
            uploads=UPLOADS,
            deadline_s=run.settings.save_deadline_s,
        )

    def rows(self, batch: Rows, data: memoryview) -> None:
        if batch.duplicate and self._plan.since is None:
            what = "the batch repeats rows, but this save does not send changed rows separately"
            raise BadBatch(what, where="row batch")
        block, precision, metrics = batch.block(data), self._plan.content.precision, self._run.metrics
        asked = precision.of_table(block.schema.fqn)
        encoding = encoding_named(asked)
        if self._plan.samples:
            self._run.bits.errors.add_sample(block)
        options = EncodeOptions(encoding=encoding, state_encoding=precision.state)
        columns = len(block.columns)
        rows = min(len(block), rows_per_frame(block.schema, columns, encoding))
        out = _buffer(frame_bound(block.schema, columns, rows))
        for frame in encode_row_frames(block, options, step=self._plan.step, out=out):
            held = frame.info.encoding
            # A frame in another encoding than requested differs from the older checkpoint's, changed or not.
            new = batch.fresh or (batch.fresh is not None and held != asked)
            again = frame.info.rows if batch.duplicate else 0
            self._writer.add(frame, since=self._plan.since if new else None, duplicated_rows=again)
            metrics.rows.labels("in", held).inc(frame.info.rows)
            metrics.raw_bytes.labels(held).inc(frame.raw_bytes)
            metrics.frame_bytes.labels("in", held).inc(frame.info.stored_bytes)

    def blob(self, chunk: pb.BlobChunk, data: memoryview) -> None:
        frame = encode_blob(
            name=chunk.name,
            offset=chunk.blob_offset,
            blob_bytes=chunk.blob_bytes,
            chunk=data,
            step=self._plan.step,
            out=_buffer(MAX_FRAME_BYTES),
        )
        self._writer.add(frame)
        self._run.metrics.raw_bytes.labels("blob").inc(frame.raw_bytes)
        self._run.metrics.frame_bytes.labels("in", "blob").inc(frame.info.length)

    def commit(self, seal: pb.SaveRequest.Seal, *, deadline_s: float) -> pb.Commit:
        """Upload the remaining packs, commit; raises `BadBatch` for missing rows, `ChainBroken` and store errors."""
        if seal.full:
            self._writer.target = replace(self._writer.target, covers=None)
        part = self._writer.finish()
        index = self._writer.index
        assert index is not None
        self._check_chain(part, [pack.key for pack in index.packs], deadline_s)
        if index.rows != seal.rows:
            raise BadBatch(f"{seal.rows} rows were sealed, {index.rows} arrived", where="seal")
        report = PartReport(
            part=part,
            tables=self._attachment.tables,
            encodings=index.encodings,
            rows=index.rows,
            raw_bytes=index.raw_bytes,
            stall_s=seal.stall_s,
            snapshot_at_s=seal.snapshot_at_s,
            directive=self._plan.content.directive,
            fingerprint=self._attachment.fingerprint,
            metadata=self._metadata(seal, baseline=part.covers is None),
            pins=tuple(sorted({*seal.pins, *(order.pin for order in self._plan.orders if order.pin)})),
            common_blobs=index.common_blobs,
        )
        try:
            committed = self._committed(report, deadline_s)
        except LogRemoved as error:
            self._run.removed = str(error)
            raise
        self._run.metrics.record_lost_samples(committed.entry.metadata.get(PLS_KEY, "0"))
        # Ranks may have covered different checkpoints: the trainer needs to know about its own part.
        return commit_message(committed.entry, baseline=part.covers is None)

    def _check_chain(self, part: Part, packs: Sequence[str], deadline_s: float) -> None:
        """Check that the objects of the part and of its chain exist, if a check is due: durable means restorable.

        Raises `ChainBroken`, and store errors.
        """
        chains, covers, rank = self._run.chains, part.covers, self._attachment.rank
        chains.record_packs(part.index_key, packs)
        last = self._plan.urgent or self._plan.reason == "close"
        if covers is not None and not last and not chains.is_check_due(rank):
            return
        state = self._log.state
        if covers is not None and covers not in state.checkpoints:
            return  # the commit will reject it
        chains.check(
            state,
            covers,
            manifests=self._run.manifests_of(self._log.run),
            boxes=self._attachment.boxes,
            rank=rank,
            single_rank=self._single_rank,
            extra_indexes={part.index_key: packs},
            deadline_s=deadline_s,
        )

    def _committed(self, report: PartReport, deadline_s: float) -> Committed:
        snapshot = self._plan

        def commit(reports: Sequence[PartReport]) -> Committed:
            return commit_parts(
                self._log,
                attempt=snapshot.attempt,
                snapshot_id=snapshot.snapshot_id,
                step=snapshot.step,
                world_size=self._attachment.world_size,
                reports=reports,
                layout=snapshot.layout,
                bodies=self._run.report_bodies,
                latency=self._run.latency if snapshot.reason in PERIODIC else None,
                since_s=time.monotonic() - self._begun_s,
                deadline_s=deadline_s,
            )

        if self._single_rank:
            return commit((report,))
        return self._joint.commit(
            snapshot.attempt,
            snapshot.snapshot_id,
            report,
            expected=self._expected,
            commit=commit,
            deadline_s=deadline_s,
        )

    def _metadata(self, seal: pb.SaveRequest.Seal, *, baseline: bool) -> dict[str, str]:
        """Return the user's metadata with this save's directive, measurements and bits, for the next sidecar."""
        content = self._plan.content
        precision = content.precision if baseline else content.chain_precision
        mine = {
            KEY: self._plan.directive_text,
            cost.KEY: self._plan.profile,
            ORDERS_KEY: " ".join(order.id for order in self._plan.orders) or None,
            PRECISION_KEY: precision.text(),
            INCREMENTS_KEY: None if baseline else content.increments,
            error_ledger.KEY: None,
        }
        if self._attachment.rank == 0:
            mine |= self._run.bits.metadata(precision if self._plan.samples else None)
        return {name: text for name, text in seal.metadata.items() if name not in mine} | {
            name: text for name, text in mine.items() if text is not None
        }

    def abandon(self) -> None:
        """Stop encoding and uploading, and drop spooled data. Callable at any time, from any thread."""
        self._writer.abort()
        if not self._single_rank:
            decline(
                self._run, self._attachment, self._plan.attempt, self._plan.snapshot_id, joint=self._joint
            )


def decline(
    run: Run,
    attachment: Attachment,
    attempt: int,
    snapshot_id: int,
    *,
    joint: JointCommits,
    process_died: bool = False,
) -> None:
    """Report that this rank's part of a snapshot will not arrive, so that its pod's other ranks and peers do not wait.

    `process_died`: the report is also written to the store, because other ranks may already wait there.
    """
    if not joint.withdraw(attempt, snapshot_id, attachment.rank) and not process_died:
        return
    if run.removed is not None:
        return  # a removed run has no waiting peers
    log = run.log_of(attachment)

    def abandon_in_store() -> None:
        with contextlib.suppress(DeltashardError):  # advisory: every wait has a deadline
            abandon_part(
                log,
                attempt=attempt,
                snapshot_id=snapshot_id,
                rank=attachment.rank,
                token=run.token,
                deadline_s=ABANDON_DEADLINE_S,
            )

    threading.Thread(target=abandon_in_store, name=f"abandon-{snapshot_id}", daemon=True).start()
