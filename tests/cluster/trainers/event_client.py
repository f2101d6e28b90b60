"""The events that a trainer sends to the test: lines of JSON over TCP."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any


class EventClient:
    """The connection of one trainer process, with facts that each of its events contains."""

    def __init__(self, **facts: Any) -> None:
        host, port = os.environ["EVENT_SERVER"].rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        pod = os.environ["POD_NAME"]
        self._facts = {
            "namespace": os.environ["POD_NAMESPACE"],
            "pod": pod,
            "node": os.environ["NODE_NAME"],
            "process": f"{pod}/{facts.get('rank', 0)}/{time.time_ns()}",
            **facts,
        }

    def send(self, kind: str, **facts: Any) -> None:
        self._socket.sendall(json.dumps({"kind": kind, **self._facts, **facts}).encode() + b"\n")
