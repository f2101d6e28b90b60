"""Attach, open an attempt, bring a checkpoint back: what happens before the first step.

Opening wins a slot of the commit log and so fences every older trainer of the run. A restore reads the blobs, compares
them with the program, scatters the rows, and applies everything else last. Afterwards marks are re-seeded from the
delta frames that were used, so that the next cut may still be a delta over the same baseline; whatever was not taken
over whole (another run, weights only, other tables) makes the next cut a baseline instead.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping

import torch
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.format.index import box_message, table_message, table_of
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.vocabulary import TRAINER_PROTOCOL
from deltashard_proto.arena_layout import STEP
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.rank import refuse_several
from deltashard.attach.session import OPEN_DEADLINE_S, Link
from deltashard.errors import (
    CheckpointMismatch,
    NotRestored,
    RestoreFailed,
    SidecarUnavailable,
)
from deltashard.restore import restore
from deltashard.restore.content_hash import Contents, equal
from deltashard.restore.restore import Blobs, ModelTargets, Restored
from deltashard.save.boundary import Boundary
from deltashard.state.fingerprint import differences
from deltashard.state.rng import apply_globals

log = logging.getLogger("deltashard")


class Resuming(Boundary):
    """Attempts and restores."""

    def _attach_request(self) -> pb.AttachRequest:
        tables = [table.schema for table in self._tracking.tables]
        request = pb.AttachRequest(
            protocol_min=TRAINER_PROTOCOL.least,
            protocol_max=TRAINER_PROTOCOL.most,
            rank=0,
            local_rank=0,
            world_size=1,
            tables=[table_message(schema) for schema in tables],
            boxes=[
                box_message(
                    Box(
                        table=schema.fqn,
                        row_start=0,
                        row_stop=schema.rows,
                        col_start=0,
                        col_stop=schema.columns,
                    )
                )
                for schema in tables
            ],
            fingerprint=self._fingerprint,
            pid=os.getpid(),
            blob_bytes=sum(t.numel() * t.element_size() for t in self._tracking.inventory.dense.values()),
        )
        if self._attempt is not None:
            request.attempt = self._attempt
        return request

    def _link_or_raise(self) -> Link:
        until_s = time.monotonic() + OPEN_DEADLINE_S
        while True:
            self._apply_events()
            link = self._session.link
            if link is not None:
                return link
            if time.monotonic() >= until_s:
                raise SidecarUnavailable("the sidecar is away", where=self.run, remedy="look at its log")
            self._awake.clear()
            self._awake.wait(0.2)

    def _open(
        self, link: Link, *, which: str, from_run: str | None, exclude: list[int], takeover: bool
    ) -> pb.OpenReply:
        # A process group may have been made since the Checkpointer was.
        refuse_several("restore(), or the first step()")
        request = pb.OpenRequest(
            session=link.session,
            which=which,
            from_run=from_run or "",
            exclude_seqs=exclude,
            takeover=takeover,
        )
        reply = restore.opened_or_raise(lambda: link.stub.Open(request, timeout=OPEN_DEADLINE_S))
        if reply.log_damage:
            log.warning("run %r: %s", from_run or self.run, reply.log_damage)
            self._emit(
                "fell_back" if reply.fell_back else "log_damaged",
                seq=reply.resume_seq if reply.HasField("resume_seq") else None,
                step=reply.step,
                why=reply.log_damage,
            )
        return reply

    def _begin_attempt(self, reply: pb.OpenReply, *, step: int) -> None:
        self._opened = True
        self._attempt = reply.attempt
        self._step = step
        self._stance.moved = False
        self._resumed_step = step
        self._cut = 0
        self._line[STEP] = step
        self._ahead.open()

    def _open_unrestored(self) -> None:
        """The first `step()` of a program that never called `restore()`."""
        link = self._link_or_raise()
        step = self._step
        reply = self._open(
            link, which="none" if self._fresh else "latest", from_run=None, exclude=[], takeover=False
        )
        if reply.HasField("resume_seq"):
            raise NotRestored(
                f"run {self.run!r} has checkpoints (the newest is of step {reply.step}), and restore() was not called",
                where=self.url,
                remedy="call restore() before the loop; fresh=True begins anew; or choose another run name",
            )
        self._begin_attempt(reply, step=step)
        self._resumed_step = None  # nothing was resumed: even this first step is not saved yet

    def _read(
        self,
        link: Link,
        reply: pb.OpenReply,
        clock: restore.Clock,
        *,
        from_run: str,
        strict: bool,
        weights_only: bool,
        renames: Mapping[str, str],
        earlier: list[ModelTargets],
        fell_back: bool,
        damage: str,
    ) -> Restored:
        seq = reply.resume_seq
        names = [source.name for source in self._sources]
        notes: list[str] = []
        targets = ModelTargets(
            self._tracking,
            [table_of(table) for table in reply.tables],
            strict=strict,
            weights_only=weights_only,
            renames=renames,
        )

        def judge(raw: Mapping[str, memoryview]) -> Blobs:
            found = Blobs.decode(raw)
            notes.extend(found.check(self._tracking, strict=strict, weights_only=weights_only, names=names))
            for failed in earlier:
                if torn := targets.covers(failed):
                    raise RestoreFailed(
                        f"an older checkpoint does not hold all of {', '.join(torn)}, which a broken newer one "
                        "overwrote",
                        where=self.run,
                        remedy=f"build the model anew and restore(which='seq:{seq}', strict=False)",
                    )
            earlier.append(targets)
            targets.place(found.strangers(self._tracking))
            return found

        received = restore.read_checkpoint(link, seq, from_run, targets, judge)
        blobs = received.blobs
        crash_point("restore.before_dense")
        notes += targets.notes
        notes += self._apply_dense(blobs, strict=strict, weights_only=weights_only)
        for table, ids in restore.delta_rows(targets.placed):
            self._tracking.reseed(table, ids)
        if not weights_only:
            notes += self._apply_state(blobs, strict=strict)
            self._tracking.watch_first_step()
        # IMPORTANT: a cut may only lean on what was taken over whole. That must outlast a first save that fails, so it
        # is said by having nothing to lean on, not by asking once for a full cut.
        continues = not from_run and not weights_only and targets.complete
        self._since_commit = seq if continues else None
        self._since_baseline = received.baseline_seq if continues else None
        self._force_full = not continues
        self._begin_attempt(reply, step=0 if from_run and weights_only else reply.step)
        exact = self._compare_content(blobs, weights_only=weights_only)
        changed = differences(blobs.meta.get("fingerprint", {}), self._fingerprint)
        if changed and not weights_only:
            log.warning("bits may differ from the lost process from here on: %s", "; ".join(changed))
        for note in notes:
            log.warning("restore: %s", note)
        lost = reply.last_step_seen - reply.step if reply.HasField("last_step_seen") else None
        if not weights_only:
            # Last of all: everything above may draw.
            self._apply_rng(blobs, strict=strict)
        return Restored(
            step=reply.step,
            seq=seq,
            attempt=reply.attempt,
            source="cache" if received.store_bytes == 0 else "store",
            lost_steps=max(0, lost) if lost is not None else None,
            seconds=clock.seconds,
            stored_bytes=received.cache_bytes + received.store_bytes,
            chain=received.chain,
            fell_back=fell_back,
            notes=tuple(([damage] if damage else []) + notes + changed),
            exact=exact,
        )

    def _apply_dense(self, blobs: Blobs, *, strict: bool, weights_only: bool) -> list[str]:
        """Tensors, what modules say themselves, optimizers; returns notes on what did not fit."""
        blobs.apply_tensors(self._tracking, strict=strict)
        notes = self._apply_modules(blobs, strict=strict)
        return notes if weights_only else notes + blobs.apply_optimizers(self._tracking)

    def _apply_modules(self, blobs: Blobs, *, strict: bool) -> list[str]:
        """What modules say in their own state_dict; then their tensors once more, which loading may have converted."""
        notes = []
        for contract in self._contracts:
            held = blobs.state.get(contract.source.name, {})
            try:
                contract.load(held)
            except CheckpointMismatch as error:
                if strict:
                    raise
                notes.append(str(error))
        if self._contracts:
            blobs.apply_tensors(self._tracking, strict=strict)
        return notes

    def _apply_state(self, blobs: Blobs, *, strict: bool) -> list[str]:
        notes = []
        modules = {contract.source.name for contract in self._contracts}
        for source in self._sources:
            if source.name not in blobs.state or source.name in modules:
                continue
            try:
                source.set(blobs.state[source.name])
            except CheckpointMismatch as error:
                if strict:
                    raise
                notes.append(f"{error}: it stays as it is")
        for name, tree in (blobs.loaders or {}).items():
            if name in self._loaders:
                self._loaders[name].resume(tree, blobs.rng)
            else:
                self._pending_loaders[name] = tree
        self._pending_rng = blobs.rng
        return notes

    def _apply_rng(self, blobs: Blobs, *, strict: bool) -> None:
        if blobs.rng is None:
            return
        rng = dict(blobs.rng)
        if not strict and (
            not torch.cuda.is_available() or torch.cuda.device_count() < len(rng.get("cuda", ()))
        ):
            rng.pop("cuda", None)
        apply_globals(rng)

    def _compare_content(self, blobs: Blobs, *, weights_only: bool) -> bool | None:
        recorded = blobs.meta.get("content")
        if self._contents is None and recorded is None:
            return None
        contents = self._contents or Contents()
        found = contents.restored(self._tracking)
        if recorded is None or weights_only:
            return None
        same = equal(recorded, found)
        if not same:
            differ = sorted(fqn for fqn, value in recorded.items() if found.get(fqn) != value)
            log.error(
                "restored content differs from what was cut, in %s: please report this", ", ".join(differ)
            )
        return same
