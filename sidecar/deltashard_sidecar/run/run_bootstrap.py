"""Bootstrap of a run without a log, from a checkpoint of another run in the same store (`restore_from`).

The checkpoint is copied into the run before its first attempt is opened, like `deltashard cp -c WHICH --as NAME`. The
log appears with that checkpoint or not at all; an interrupted copy continues at the next Open. The trainer thus always
restores a checkpoint of the same run, and no other part of the system refers to the source run.
"""

from __future__ import annotations

import threading

from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.errors import FormatError, UserError
from deltashard_checkpoint.log.chain import CheckpointNotFound
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.listing import REMOVAL
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.maintenance.row_mover import CompactionUnsupported
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.whole_run.run_copy import TargetTaken, start_run
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.run.identity import Identity
from deltashard_sidecar.telemetry.structured_logging import Logger

WHERE = "deltashard.io/restore-from, DELTASHARD_RESTORE_FROM"


class BootstrapRefused(UserError):
    """The run cannot start from the checkpoint that `restore_from` names."""


class RunBootstrap:
    """Copies the first checkpoint. Thread-safe: the second of two concurrent Opens finds the copy of the first."""

    def __init__(
        self, restore_from: str, store: Store, identity: Identity, cache: PackCache, log: Logger
    ) -> None:
        """`restore_from`: RUN or RUN@PIN; empty: the run starts without a checkpoint."""
        self._restore_from = restore_from
        self._store = store
        self._identity = identity
        self._cache = cache
        self._logger = log
        self._lock = threading.Lock()
        self._logged = False

    def ensure(self, request: pb.OpenRequest, *, deadline_s: float) -> None:
        """Copy the checkpoint unless the run has a log; raises `BootstrapRefused` and the errors of `start_run`."""
        if not self._restore_from:
            return
        log = RunLog(self._store, self._identity.run)
        with self._lock:
            if not self._has_log(log, deadline_s):
                self._check(request)
                self._copy(log, deadline_s)
            elif not self._logged:
                self._logger.info("restore_from.ignored", what="the run already has a log")
            self._logged = True

    @staticmethod
    def _has_log(log: RunLog, deadline_s: float) -> bool:
        hint = log.hint()
        if not hint.whole and hint != REMOVAL:
            return log.listed().tip >= hint.seq
        try:
            return log.refresh(deadline_s=deadline_s).tip >= 0
        except (LogGap, FormatError):  # it is damaged, which opening the attempt reports
            return True

    def _check(self, request: pb.OpenRequest) -> None:
        script = "fresh=True" if request.which == "none" else ""
        if request.from_run:
            script = f"restore(from_run={request.from_run!r})"
        if script:
            what = f"restore_from is {self._restore_from}, but the training script passes {script}"
            raise BootstrapRefused(what, where=WHERE, remedy="use only one of the two")

    def _copy(self, log: RunLog, deadline_s: float) -> None:
        name, _, pin = self._restore_from.partition("@")
        source, which = RunLog(self._store, name), f"pin:{pin}" if pin else "latest"
        where = f"{WHERE}; {self._store.url}"
        try:
            owner = self._identity.owner
            done = start_run(source, log, which, self._cache, owner=owner, resume=True, deadline_s=deadline_s)
        except (CheckpointNotFound, CompactionUnsupported) as error:
            there = source.state.tip >= 0
            remedy = "correct the name; without the annotation the run begins at step 0"
            if isinstance(error, CompactionUnsupported):
                remedy = "leave it to the training script: restore(from_run=) reads it without a copy"
            elif there and error.remedy:
                remedy = f"{error.remedy}; {remedy}"
            what = error.what if there else "there is no such run in the store"
            what = f"the run cannot begin with {which} of run {name!r}: {what}"
            raise BootstrapRefused(what, where=where, remedy=remedy) from error
        except TargetTaken as error:
            if self._has_log(log, deadline_s):
                return  # another pod of this run has made the copy
            what = f"an interrupted copy of the run's first checkpoint does not continue: {error.what}"
            remedy = "restart if another pod is starting the run; else remove the copy with `deltashard rm --ended`"
            raise BootstrapRefused(what, where=where, remedy=remedy) from error
        self._logger.info(
            "restore_from.copied", source=name, seq=done.source_seq, step=done.step, bytes=done.bytes
        )
