"""`restore()` on all ranks of a group: rank 0 opens the attempt for all, and all agree on the outcome.

    open     rank 0's sidecar wins the slot with the layout of all ranks; the others attach to the same attempt
    agree    each rank reports its outcome: complete, incomplete (all fall back together), or failed (all raise)

A rank that raises reports its error first, so no rank waits for one that gave up. No torch collective is used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import DeltashardError, InvalidCheckpoint
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard import errors
from deltashard.attach.rank import Rank
from deltashard.attach.session import OPEN_DEADLINE_S
from deltashard.errors import CheckpointRetired, RanksDiffer, RestoreFailed, SidecarGone
from deltashard.group.rank_manifest import RankManifest, agreed_layout
from deltashard.group.rendezvous import Rendezvous
from deltashard.program import Program
from deltashard.restore.frame_stream import RESTORE_DEADLINE_S
from deltashard.state.replica import differing_replicas, sums

_ERROR_KINDS = {
    "run_advanced": CheckpointRetired,
    "sidecar_gone": SidecarGone,
    "incomplete": InvalidCheckpoint,
}
_KINDS_BY_SEVERITY = ("complete", *_ERROR_KINDS, "failed")


class CollectiveRestore:
    """One rank's part in one `restore()`; on the training thread only."""

    def __init__(
        self, rank: Rank, program: Program, facts: Mapping[str, Any], attached: pb.AttachReply | None = None
    ) -> None:
        """Join the rendezvous; `facts` must be equal on all ranks. Raises `RanksDiffer`, `GroupLost`.

        `attached`: the Attach reply of this rank's sidecar, if it is attached.
        """
        self._rank = rank
        self._program = program
        dense = program.tracking.dense()
        manifest = RankManifest(
            facts=facts,
            tables=program.shapes,
            dense={name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in dense.items()},
            boxes=program.boxes,
            participated_attempt=0 if attached is None else attached.participated_attempt,
        )
        self._rendezvous = Rendezvous(rank.number, rank.world_size, manifest.text())
        self._round = 0
        self._sent: list[tuple[str, int]] = []
        """(name, bytes) of the data that this rank sent through the store."""

    @property
    def name(self) -> str:
        return self._rendezvous.name

    @property
    def prefix(self) -> str:
        """Prefix of the group's keys under the latest attempt."""
        return f"{self._rendezvous.prefix}{self._round}/"

    def open(self, ask: Callable[[pb.OpenRequest], pb.OpenReply]) -> pb.OpenReply:
        """Return the reply of rank 0's sidecar on every rank; raises rank 0's error on every rank.

        `ask` gets the part of the request that depends on all ranks: layout and attempts.
        """

        def opened() -> str:
            manifests = [RankManifest.of(text) for text in self._rendezvous.manifests]
            participated_attempt = max(each.participated_attempt for each in manifests)
            reply = ask(
                pb.OpenRequest(
                    layout=agreed_layout(manifests).data, participated_attempt=participated_attempt
                )
            )
            crash_point("open.before_publish")
            return reply.SerializeToString().hex()

        self._round += 1
        encoded = self._from_rank_0(f"open/{self._round}", opened)
        if self._rank.number == 0:
            crash_point("open.after_publish")
        return pb.OpenReply.FromString(bytes.fromhex(encoded))

    def _from_rank_0(self, what: str, make: Callable[[], str]) -> str:
        """Return on every rank what `make` returns on rank 0; raises rank 0's error on every rank."""
        if self._rank.number == 0:
            try:
                made = make()
            except BaseException as error:
                self._rendezvous.broadcast(what, b"-" + json.dumps(_encode_error(error)).encode())
                raise
            self._rendezvous.broadcast(what, b"+" + made.encode())
            return made
        answer = self._rendezvous.await_broadcast(what, 2 * OPEN_DEADLINE_S).decode()
        if answer[0] == "-":
            raise _decode_error(json.loads(answer[1:]), "rank 0: ")
        return answer[1:]

    def agree(self, stage: str, error: BaseException | None = None) -> None:
        """Report this rank's outcome of `stage`, and wait for the outcome of all ranks.

        Raises:
            InvalidCheckpoint: the checkpoint is invalid on some rank: all fall back.
            CheckpointRetired: the checkpoint was retired on some rank: all request it again.
            SidecarGone: some rank's sidecar died: all retry.
            RanksDiffer: replicas differ between ranks.
            DeltashardError: the error of the failed rank; on that rank `error` itself.
        """
        stage = f"{stage}/{self._round}"
        kind = (
            "complete"
            if error is None
            else next((k for k, e in _ERROR_KINDS.items() if isinstance(error, e)), "failed")
        )
        mine: dict[str, Any] = {"kind": kind, "error": None if error is None else _encode_error(error)}
        if stage.startswith("restored") and error is None:
            mine["sums"] = self.sums(0)
        self._rendezvous.submit(stage, json.dumps(mine).encode())
        crash_point("agree.answered")
        if self._rank.number == 0:
            outcomes = [json.loads(text) for text in self._rendezvous.gather(stage, RESTORE_DEADLINE_S)]
            self._rendezvous.broadcast(stage, json.dumps(self._resolve_outcome(outcomes)).encode())
            crash_point("agree.published")
        verdict = json.loads(self._rendezvous.await_broadcast(stage, RESTORE_DEADLINE_S))
        if verdict["kind"] == "complete":
            return
        if error is not None and verdict["kind"] == kind:
            raise error
        if verdict["kind"] == "incomplete":
            raise InvalidCheckpoint(verdict["error"]["what"], where=f"rank {verdict['rank']}")
        raise _decode_error(verdict["error"], f"rank {verdict['rank']}: ")

    def resolve(self, what: str, word: str, decide: Callable[[list[str]], str]) -> str:
        """Return on every rank rank 0's decision on all ranks' `word`; raises rank 0's error on every rank."""
        what = f"{what}/{self._round}"
        self._rendezvous.submit(what, word.encode())
        return self._from_rank_0(
            what, lambda: decide([text.decode() for text in self._rendezvous.gather(what, OPEN_DEADLINE_S)])
        )

    def send(self, what: str, data: bytes | None) -> None:
        """Provide `data` to the other ranks until `release_sent`; None: this rank cannot provide it."""
        what = f"{what}/{self._round}"
        self._rendezvous.send(what, data)
        self._sent.append((what, 0 if data is None else len(data)))

    def receive(self, what: str) -> bytes | None:
        """Return what another rank sends, or None if it cannot; raises `RanksDiffer` when no answer arrives."""
        return self._rendezvous.receive(f"{what}/{self._round}", RESTORE_DEADLINE_S)

    def release_sent(self) -> None:
        for what, size in self._sent:
            self._rendezvous.delete_sent(what, size)
        self._sent.clear()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run the body on all ranks, and continue only if it succeeds on all; raises as `agree`."""
        with self.reporting_failure(name):
            yield
        self.agree(name)

    @contextlib.contextmanager
    def reporting_failure(self, name: str) -> Iterator[None]:
        """Report an error of the body to the ranks that wait at the end of stage `name`; raises as `agree`."""
        try:
            yield
        except BaseException as error:
            self.agree(name, error)
            raise

    def sums(self, seed: int) -> str:
        return sums(self._program.tracking.replicas, seed)

    def _resolve_outcome(self, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
        worst = max(
            range(len(outcomes)), key=lambda rank: (_KINDS_BY_SEVERITY.index(outcomes[rank]["kind"]), -rank)
        )
        if outcomes[worst]["kind"] != "complete":
            return {"kind": outcomes[worst]["kind"], "rank": worst, "error": outcomes[worst]["error"]}
        if "sums" in outcomes[0]:
            try:
                check_replicas_equal(
                    self._program, {rank: each["sums"] for rank, each in enumerate(outcomes)}
                )
            except RanksDiffer as error:
                return {"kind": "failed", "rank": 0, "error": _encode_error(error)}
        return {"kind": "complete"}


def check_replicas_equal(program: Program, sums_by_rank: Mapping[int, str]) -> None:
    """Raises `RanksDiffer` when replicated data differs between ranks, according to each rank's sums."""
    differ = differing_replicas(program.tracking.replicas, sums_by_rank)
    if differ:
        shown = "; ".join(differ[:4]) + (f" and {len(differ) - 4} more" if len(differ) > 4 else "")
        raise RanksDiffer(
            f"data that every rank replicates is saved once, but differs from rank 0's: {shown}",
            where="replicas",
            remedy="train the dense part under DistributedDataParallel, shard tables with TorchRec, and give different "
            "tables different names",
        )


def _encode_error(error: BaseException) -> dict[str, str]:
    if isinstance(error, DeltashardError):
        return {
            "kind": type(error).__name__,
            "what": error.what,
            "where": error.where,
            "remedy": error.remedy,
        }
    return {
        "kind": "",
        "what": f"{type(error).__name__}: {error}",
        "where": "restore()",
        "remedy": "see its log",
    }


def _decode_error(encoded: Mapping[str, str], whose: str) -> DeltashardError:
    kind: type[DeltashardError] = getattr(errors, encoded["kind"], RestoreFailed)
    return kind(whose + encoded["what"], where=encoded["where"], remedy=encoded["remedy"])
