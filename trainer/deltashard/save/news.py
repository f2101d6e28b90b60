"""What the session thread heard, applied on the training thread, at a step boundary or while that waits itself.

News comes as events (an attachment, its loss, a commit, a failed save, a notice); marks, handles and counters are only
touched here, so that they need no locks. Once the attempt is fenced, applying news raises, every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltashard_proto.cause import heard
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import SidecarAttachment
from deltashard.attach.lifecycle import AttachEvent, AttachState, TrainingAttempt
from deltashard.attach.listener import Listener
from deltashard.attach.session import Attached, FencedOff, Lost
from deltashard.cut.save_stream import CutFailed
from deltashard.save.handle import Commit, SaveHandle, Stats
from deltashard.save.request import Requests
from deltashard.save.saver import Saver
from deltashard.tracking.step_clock import StepClock


class News:
    """Hands each event to the part that it concerns."""

    def __init__(
        self,
        attachment: SidecarAttachment,
        attempt: TrainingAttempt,
        *,
        clock: StepClock,
        saver: Saver,
        requests: Requests,
        stats: Stats,
        listener: Listener,
    ) -> None:
        self._attachment = attachment
        self._session = attachment.session
        self._attempt = attempt
        self._clock = clock
        self._saver = saver
        self._requests = requests
        self._stats = stats
        self._listener = listener

    def apply(self) -> None:
        """What the session thread heard since the last time; raises `FencedError`."""
        while (event := self._session.next_event()) is not None:
            if isinstance(event, Attached):
                after = self._attempt.happen(AttachEvent.ATTACH)
                # A cut may have described its tables anew since: that link has replaced this one, and is adopted.
                if after is not AttachState.CLOSED and event.link is self._session.link:
                    self._saver.adopt(event.link)
                self._listener.emit("attached", session=event.link.session)
            elif isinstance(event, Lost):
                self._attempt.happen(AttachEvent.LOSE)
                self._listener.emit("sidecar_lost", why=event.why)
            elif isinstance(event, FencedOff):
                self._attempt.happen(AttachEvent.FENCE)
            elif isinstance(event, pb.Notice):
                self._apply_notice(event)
            else:
                event()
        if self._session.fenced is not None:
            self._clock.notice()  # every later step() raises as well
            self._requests.fail(self._session.fenced)
            self._saver.give_up(self._session.fenced)
            raise self._session.fenced

    def tracked(self, name: str, facts: Mapping[str, Any]) -> None:
        """Tracking found something from within an optimizer's step: told at the next boundary."""
        if name == "state_thrown_away":
            self._stats.count_thrown_away()
        self._session.post(lambda: self._listener.emit(name, **facts))

    def _apply_notice(self, notice: pb.Notice) -> None:
        kind = notice.WhichOneof("kind")
        if kind == "committed":
            self._saver.committed(Commit.of(notice.committed))
        elif kind == "save_failed":
            failed = notice.save_failed
            self._saver.failed(failed.cut, CutFailed(heard(failed.cause), failed.message))
        elif kind == "save_now":
            if notice.save_now.urgent:
                self._requests.hurry(notice.save_now.reason or "urgent")
            else:
                self._requests.add(SaveHandle(reason=notice.save_now.reason, pin=None, metadata={}))
        elif kind == "policy":
            self._attachment.instruct(notice.policy)
