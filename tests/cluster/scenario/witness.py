"""What trainers say to the test itself, past deltashard: a TCP server on the bridge, and the history it heard.

A *life* is one trainer process. A step is said before `Checkpointer.step()` is called for it. Jobs are named
`{namespace}/{name}` here.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from tests.cluster.kubernetes.process import ClusterError
from tests.support.machine import limit_s

Event = dict[str, Any]


def _is_of(event: Event, job: str) -> bool:
    return f"{event['namespace']}/{event['pod']}".startswith(f"{job}-")


class Witness:
    """Hears trainers; use as a context manager."""

    def __init__(self, host: str) -> None:
        self._heard = threading.Condition()
        self._events: list[Event] = []
        outer = self

        class Listener(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    outer._hear(json.loads(line))

        self._server = socketserver.ThreadingTCPServer((host, 0), Listener)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()

    @property
    def address(self) -> str:
        """host:port."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stop hearing."""
        self._server.shutdown()
        self._server.server_close()

    def _hear(self, event: Event) -> None:
        with self._heard:
            self._events.append(event)
            self._heard.notify_all()

    def of(self, job: str) -> list[Event]:
        """Everything the pods of a Job said so far."""
        with self._heard:
            return [event for event in self._events if _is_of(event, job)]

    def wait(self, job: str, matches: Callable[[Event], bool], *, timeout_s: float, what: str) -> Event:
        """The first event of a Job's pods that matches, waiting for it if need be; raises `ClusterError`."""
        found: list[Event] = []

        def heard() -> bool:
            found[:] = [e for e in self._events if _is_of(e, job) and matches(e)][:1]
            return bool(found)

        with self._heard:
            if not self._heard.wait_for(heard, limit_s(timeout_s)):
                said = [e for e in self._events if _is_of(e, job)]
                raise ClusterError(f"not within {limit_s(timeout_s):.0f} s: {what}; last heard: {said[-3:]}")
        return found[0]

    def began(self, job: str, life: int, *, timeout_s: float = 90.0) -> Event:
        """The begin of the Job's trainer number `life`, counted from 0."""

        def nth(event: Event) -> bool:
            begun = [e for e in self._events if _is_of(e, job) and e["kind"] == "began"]
            return len(begun) > life and event is begun[life]

        return self.wait(job, nth, timeout_s=timeout_s, what=f"trainer {life} of {job} began")

    def wait_step(self, life: str, step: int, *, timeout_s: float) -> None:
        """Wait until one trainer process has done a step."""
        with self._heard:
            heard = self._heard.wait_for(
                lambda: any(
                    e["life"] == life and e["kind"] == "step" and e["step"] >= step for e in self._events
                ),
                limit_s(timeout_s),
            )
        if not heard:
            raise ClusterError(
                f"not within {limit_s(timeout_s):.0f} s: step {step} of {life}; it did {self.last_step(life)}"
            )

    def last_step(self, life: str) -> int:
        """The newest step that one trainer process has done."""
        with self._heard:
            steps = [
                event["step"] for event in self._events if event["life"] == life and event["kind"] == "step"
            ]
        return max(steps, default=0)
