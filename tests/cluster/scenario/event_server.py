"""A TCP server on the bridge that receives and keeps the events of trainers; deltashard is not involved.

`process` in an event identifies one trainer process. A trainer reports a step before it calls `Checkpointer.step()`
for it. Jobs are named `{namespace}/{name}` here.
"""

from __future__ import annotations

import itertools
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from tests.cluster.kubernetes.process import ClusterError
from tests.support.machine import limit_s

Event = dict[str, Any]


class EventServer:
    """Receives the trainers' events from the start until `close`."""

    def __init__(self, host: str) -> None:
        self._condition = threading.Condition()
        self._events: list[tuple[str, Event]] = []
        """Events, each with `{namespace}/{pod}`."""
        self._last_step: dict[str, int] = {}
        """By trainer process."""
        outer = self

        class EventHandler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    outer._receive(json.loads(line))

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads, block_on_close = True, False

        self._server = Server((host, 0), EventHandler)
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _receive(self, event: Event) -> None:
        with self._condition:
            self._events.append((f"{event['namespace']}/{event['pod']}", event))
            if event["kind"] == "step":
                self._last_step[event["process"]] = max(event["step"], self.last_step(event["process"]))
            self._condition.notify_all()

    def of(self, job: str, kind: str) -> list[Event]:
        with self._condition:
            return [e for pod, e in self._events if e["kind"] == kind and pod.startswith(f"{job}-")]

    def wait(self, job: str, matches: Callable[[Event], bool], *, timeout_s: float, what: str) -> Event:
        """Wait for the first event of a Job's pods that matches, and return it; raise `ClusterError` on a timeout.

        `matches` is called once for each event, in order: a new search after each event would cost too much for
        thousands of events.
        """
        position = 0
        received: list[Event] = []

        def matched() -> bool:
            nonlocal position
            while position < len(self._events):
                pod, event = self._events[position]
                position += 1
                if pod.startswith(f"{job}-"):
                    received[:] = [*received[-2:], event]
                    if matches(event):
                        return True
            return False

        with self._condition:
            if not self._condition.wait_for(matched, limit_s(timeout_s)):
                raise ClusterError(f"not within {limit_s(timeout_s):.0f} s: {what}; last events: {received}")
        return received[-1]

    def start_event(self, job: str, number: int, *, timeout_s: float = 90.0) -> Event:
        """Return the start event of the Job's trainer process `number`, counted from 0."""
        begun = itertools.count()
        return self.wait(
            job,
            lambda event: event["kind"] == "began" and next(begun) == number,
            timeout_s=timeout_s,
            what=f"trainer {number} of {job} began",
        )

    def wait_step(self, process: str, step: int, *, timeout_s: float) -> None:
        with self._condition:
            reached = self._condition.wait_for(lambda: self.last_step(process) >= step, limit_s(timeout_s))
        if not reached:
            raise ClusterError(
                f"not within {limit_s(timeout_s):.0f} s: step {step} of {process}, which is at step {self.last_step(process)}"
            )

    def last_step(self, process: str) -> int:
        return self._last_step.get(process, 0)
