"""All ranks of a group in one `restore()`: rank 0 opens the attempt for all, and all agree on what was brought back.

    open     rank 0's sidecar wins the slot, with the layout of all ranks; the others attach with what it won
    agree    each rank says how far it came: whole, not whole (all fall back together), or failed (all raise)

Whoever raises tells the others first, so that nobody waits for a rank that has given up. Nothing here is a collective.
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
    """One rank's side of one `restore()`; on the training thread only."""

    def __init__(
        self, rank: Rank, program: Program, facts: Mapping[str, Any], said: pb.AttachReply | None = None
    ) -> None:
        """Come together; `facts` must be equal on all ranks. Raises `RanksDiffer`, `GroupLost`.

        `said`: what this rank's sidecar said at Attach, where it is there.
        """
        self._rank = rank
        self._program = program
        dense = program.tracking.dense()
        word = RankManifest(
            facts=facts,
            tables=program.shapes,
            dense={name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in dense.items()},
            boxes=program.boxes,
            took_part=0 if said is None else said.took_part,
        )
        self._rendezvous = Rendezvous(rank.number, rank.world_size, word.text())
        self._round = 0
        self._sent: list[tuple[str, int]] = []
        """(what, bytes) that lies in the store for others."""

    @property
    def name(self) -> str:
        return self._rendezvous.name

    @property
    def prefix(self) -> str:
        """Of the group's keys under the attempt that was opened last."""
        return f"{self._rendezvous.prefix}{self._round}/"

    def open(self, ask: Callable[[pb.OpenRequest], pb.OpenReply]) -> pb.OpenReply:
        """What rank 0's sidecar answers to `ask`, for all; raises what rank 0 met, on every rank.

        `ask` is given what all ranks together have to say in the request: layout and attempts.
        """

        def opened() -> str:
            manifests = [RankManifest.of(text) for text in self._rendezvous.manifests]
            took_part = max(word.took_part for word in manifests)
            reply = ask(pb.OpenRequest(layout=agreed_layout(manifests).data, took_part=took_part))
            crash_point("open.before_publish")
            return reply.SerializeToString().hex()

        self._round += 1
        told = self._from_rank_0(f"open/{self._round}", opened)
        if self._rank.number == 0:
            crash_point("open.after_publish")
        return pb.OpenReply.FromString(bytes.fromhex(told))

    def _from_rank_0(self, what: str, make: Callable[[], str]) -> str:
        """What rank 0 makes, on every rank; raises what it met doing so, on every rank."""
        if self._rank.number == 0:
            try:
                made = make()
            except BaseException as error:
                self._rendezvous.broadcast(what, b"-" + json.dumps(_encode_error(error)).encode())
                raise
            self._rendezvous.broadcast(what, b"+" + made.encode())
            return made
        told = self._rendezvous.await_broadcast(what, 2 * OPEN_DEADLINE_S).decode()
        if told[0] == "-":
            raise _decode_error(json.loads(told[1:]), "rank 0: ")
        return told[1:]

    def agree(self, stage: str, error: BaseException | None = None) -> None:
        """Say that this rank came through `stage`, or not, and hear of the others.

        Raises:
            InvalidCheckpoint: some rank found the checkpoint not whole: all fall back.
            CheckpointRetired: some rank found it retired: all ask anew.
            SidecarGone: some rank's sidecar died: all begin again.
            RanksDiffer: replicas are not the same on all ranks.
            what the rank that failed raised: here `error` itself.
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
            said = [json.loads(text) for text in self._rendezvous.gather(stage, RESTORE_DEADLINE_S)]
            self._rendezvous.broadcast(stage, json.dumps(self._resolve_outcome(said)).encode())
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
        """What rank 0 makes of all ranks' words, for all; raises what it met doing so, on every rank."""
        what = f"{what}/{self._round}"
        self._rendezvous.submit(what, word.encode())
        return self._from_rank_0(
            what, lambda: decide([text.decode() for text in self._rendezvous.gather(what, OPEN_DEADLINE_S)])
        )

    def send(self, what: str, data: bytes | None) -> None:
        """Give the others bytes of this rank's, until `release_sent`; None: it cannot, after all."""
        what = f"{what}/{self._round}"
        self._rendezvous.send(what, data)
        self._sent.append((what, 0 if data is None else len(data)))

    def receive(self, what: str) -> bytes | None:
        """What another rank sends; None: it cannot. Raises `RanksDiffer` when it answers nothing."""
        return self._rendezvous.receive(f"{what}/{self._round}", RESTORE_DEADLINE_S)

    def release_sent(self) -> None:
        for what, size in self._sent:
            self._rendezvous.delete_sent(what, size)
        self._sent.clear()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What is done within, all ranks do, or none goes on; raises as `agree`."""
        with self.reporting_failure(name):
            yield
        self.agree(name)

    @contextlib.contextmanager
    def reporting_failure(self, name: str) -> Iterator[None]:
        """Who fails within tells those that will wait for it at the end of stage `name`; raises as `agree`."""
        try:
            yield
        except BaseException as error:
            self.agree(name, error)
            raise

    def sums(self, seed: int) -> str:
        return sums(self._program.tracking.replicas, seed)

    def _resolve_outcome(self, said: list[dict[str, Any]]) -> dict[str, Any]:
        worst = max(range(len(said)), key=lambda rank: (_KINDS_BY_SEVERITY.index(said[rank]["kind"]), -rank))
        if said[worst]["kind"] != "complete":
            return {"kind": said[worst]["kind"], "rank": worst, "error": said[worst]["error"]}
        if "sums" in said[0]:
            try:
                check_replicas_equal(self._program, {rank: each["sums"] for rank, each in enumerate(said)})
            except RanksDiffer as error:
                return {"kind": "failed", "rank": 0, "error": _encode_error(error)}
        return {"kind": "complete"}


def check_replicas_equal(program: Program, said: Mapping[int, str]) -> None:
    """Raises `RanksDiffer` when what every rank has, by the sums each said, is not the same on all."""
    differ = differing_replicas(program.tracking.replicas, said)
    if differ:
        shown = "; ".join(differ[:4]) + (f" and {len(differ) - 4} more" if len(differ) > 4 else "")
        raise RanksDiffer(
            f"what every rank holds whole is saved once, and is not the same as on rank 0: {shown}",
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


def _decode_error(said: Mapping[str, str], whose: str) -> DeltashardError:
    kind: type[DeltashardError] = getattr(errors, said["kind"], RestoreFailed)
    return kind(whose + said["what"], where=said["where"], remedy=said["remedy"])
