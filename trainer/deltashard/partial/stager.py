"""Stages a survivor's data: the current values of rows changed since the last commit, and all other state.

Staging runs on the training thread after a collective has raised, or on the watchdog's while the training thread is
inside one that never returns. Tables on every rank are staged whole, except on the rank that saves them, which knows
which rows changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from deltashard_checkpoint.codecs.encoding import raw_encoding
from deltashard_checkpoint.format.frame_encoder import EncodedFrame, encode_blob_frames, encode_row_frames
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.typed_tree import EncodedTree

from deltashard.partial import staged_part
from deltashard.partial.peer import Peers
from deltashard.partial.recovery_context import RecoveryContext
from deltashard.partial.rule import StagedMetadata
from deltashard.program import Program
from deltashard.sharded.batched_kernel import KernelShard
from deltashard.state.value import array_of
from deltashard.tracking.snapshot_base import SnapshotBase
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import TrackedTable

log = logging.getLogger("deltashard")

PEER_DEATH_WAIT_S = 2.0
"""A collective failed because a rank died if one is found dead within so long: locks are released last."""
POLL_S = 0.02
UPDATE_TIMEOUT_S = 10.0
"""A fused update that takes longer was interrupted by an exception, so the rank is not staged."""


class Stager:
    """Stages one rank, at most once."""

    def __init__(
        self,
        context: RecoveryContext,
        program: Program,
        base: SnapshotBase,
        *,
        clock: StepClock,
        peers: Peers,
        blobs: Callable[[int], Iterable[tuple[str, EncodedTree]]],
    ) -> None:
        """`blobs(step)` returns all data of this rank at that step except rows, by plain names."""
        self._context = context
        self._program = program
        self._tracking = program.tracking
        self._blobs = blobs
        self._base = base
        self._clock = clock
        self._peers = peers
        self._lock = threading.Lock()
        self._done = False
        self._updating_since_s = 0.0
        for table in (
            self._tracking.tables if context.terms is not None and not context.disabled_reason else ()
        ):
            if isinstance(table.found.kernel, KernelShard):
                table.found.kernel.batch.watch(lambda begins: self._tracking.steps.update(begins=begins))

    def handle_error(self, error: BaseException) -> bool:
        """Stage if `error`, raised in the training loop, means that a rank died; returns whether it does."""
        # torch raises failures of collectives as RuntimeError or its subclasses. Any other error is this rank's own,
        # and the state that caused it is not worth keeping.
        if not self._context.ready or not isinstance(error, RuntimeError):
            return False
        until_s = time.monotonic() + PEER_DEATH_WAIT_S
        idle = threading.Event()
        while not self._peers.is_peer_failure(error) and not self._peers.dead:
            if time.monotonic() >= until_s:
                return False
            idle.wait(POLL_S)
        if self._tracking.steps.updating:
            log.warning(
                "a rank died, and a fused update of this rank was interrupted: this rank is not staged"
            )
        else:
            self.stage(lambda: True)
        return True

    def stage(self, is_current: Callable[[], bool]) -> bool:
        """Stage this rank's data while `is_current()`; returns whether staging is finished."""
        with self._lock:
            if self._done or not self._context.ready:
                return True
            try:
                done = self._stage(is_current)
            except Exception as error:  # noqa: BLE001 - a user's getter, a full disk: this rank counts as lost
                log.warning(
                    "a rank died, and this rank could not be staged (%s: %s): its rows return to the last checkpoint",
                    type(error).__name__,
                    error,
                )
                staged_part.discard(self._context.staging_dir, self._context.rank)
                done = True
            self._done = done
            return done

    def _stage(self, is_current: Callable[[], bool]) -> bool:
        context, tracking, steps = self._context, self._tracking, self._tracking.steps
        covers = self._base.commit
        if covers is None or context.attempt is None or self._clock.step == 0:
            log.warning(
                "a rank died before the first checkpoint of this run: there is no checkpoint to stage upon"
            )
            return True
        if steps.updating:
            # On the watchdog's thread: the training thread is in a kernel, which will return.
            self._updating_since_s = self._updating_since_s or time.monotonic()
            return time.monotonic() - self._updating_since_s > UPDATE_TIMEOUT_S
        began_s, where = time.monotonic(), self._step_state()
        staged = StagedMetadata(
            run=context.run,
            attempt=context.attempt,
            rank=context.rank,
            world_size=context.world_size,
            layout=context.layout,
            lineage=context.lineage,
            covers=covers,
            step=self._clock.step,
            clean=not steps.stepped and not steps.inside,
            ahead=steps.updated,
            pls=context.pls,
            recoveries=context.recoveries,
        )
        tracking.audit_before_commit()
        counts = tracking.refresh()
        path = staged_part.write(
            context.staging_dir,
            staged,
            self._frames(staged.step),
            boxes=(table.box for table in tracking.tables),
        )
        if not is_current() or self._step_state() != where:
            path.unlink()  # the training thread continued meanwhile, so the data is not of one instant
            return False
        staged_part.publish(context.staging_dir, context.rank)
        log.warning(
            "a rank died: %d rows of step %d are staged on top of checkpoint %d, in %.1f s",
            counts.commit,
            staged.step,
            covers,
            time.monotonic() - began_s,
        )
        return True

    def _step_state(self) -> tuple[object, ...]:
        steps = self._tracking.steps
        return self._clock.step, steps.updating, steps.updated, steps.stepped, len(steps.inside)

    def _frames(self, step: int) -> Iterator[EncodedFrame]:
        for table in self._tracking.tables:
            for block in _blocks(table):
                options = EncodeOptions(encoding=raw_encoding(table.schema.dtype))
                yield from encode_row_frames(block, options, step=step)
        for name, tree in self._blobs(step):
            yield from encode_blob_frames(name=name, data=tree.to_bytes(), step=step)


ROWS_PER_BLOCK = 1 << 16


def _blocks(table: TrackedTable) -> Iterator[RowBlock]:
    """Yield the rows of one shard to stage, in blocks of `ROWS_PER_BLOCK`."""
    ids = table.select_rows("since_commit").ids if table.saver is None else None
    weights, fields = array_of(table.param), {k: array_of(v) for k, v in table.state_tensors().items()}
    chosen = np.arange(weights.shape[0], dtype=np.int64) if ids is None else ids.numpy()
    width = table.box.col_stop - table.box.col_start
    for at in range(0, len(chosen), ROWS_PER_BLOCK):
        some = chosen[at : at + ROWS_PER_BLOCK]
        yield RowBlock(
            schema=table.schema,
            ids=some + table.box.row_start,
            weights=np.ascontiguousarray(weights[some]),
            fields={
                spec.name: np.ascontiguousarray(fields[spec.name][some]).reshape(spec.shape(len(some), width))
                for spec in table.schema.fields
            },
            columns=range(table.box.col_start, table.box.col_stop),
        )
