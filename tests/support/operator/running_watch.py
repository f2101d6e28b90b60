"""An `ObjectWatch` that runs during a test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator

from deltashard_operator.kube.object_watch import ObjectWatch


@contextlib.contextmanager
def running(watch: ObjectWatch) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    task = loop.create_task(watch.run())
    thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait({task}),))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(120)
        assert not thread.is_alive()
        loop.close()
        gc.collect()  # asyncio leaves it the socket of a failed TLS handshake: collect it now, not in another test
