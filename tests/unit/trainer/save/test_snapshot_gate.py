"""Why a snapshot waits: all block reasons, their order, and which requests one snapshot can satisfy."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future

import pytest
from deltashard.save.comparison import Comparison
from deltashard.save.handle import InFlightSave, SaveHandle, split_compatible
from deltashard.save.snapshot_gate import Asker, SnapshotGate
from deltashard_proto.block_reason import BlockReason

ALL = set(Asker)
APPLIES_TO: dict[str, tuple[BlockReason, set[Asker]]] = {
    "torn": (BlockReason.TORN, ALL),
    "stepped": (BlockReason.STEPPED, ALL),
    "accumulating": (BlockReason.ACCUMULATING, ALL - {Asker.CLOSE}),
    "moved": (BlockReason.MOVED, ALL - {Asker.CLOSE}),
    "in_flight": (BlockReason.IN_FLIGHT, ALL),
    "away": (BlockReason.SIDECAR_DISCONNECTED, ALL),
    "backing_off": (BlockReason.BACK_OFF, {Asker.TIMER, Asker.REQUEST, Asker.URGENT}),
}
"""Maps a fact to its block reason and to the requesters that it blocks. The first reason that applies is named."""


@pytest.mark.parametrize("asker", list(Asker))
def test_first_reason_that_applies_to_the_requester_blocks(asker: Asker) -> None:
    for facts in itertools.product([False, True], repeat=len(APPLIES_TO)):
        holds = dict(zip(APPLIES_TO, facts, strict=True))
        gate = SnapshotGate.of(**holds)
        reasons = [wait for name, (wait, askers) in APPLIES_TO.items() if holds[name] and asker in askers]
        assert gate.block_reason(asker) == (reasons[0] if reasons else None), holds
        of_the_program = [APPLIES_TO[name][0] for name in list(APPLIES_TO)[:4] if holds[name]]
        assert gate.not_at_boundary == (of_the_program[0] if of_the_program else None), holds


def test_snapshot_serves_all_requests_with_compatible_metadata() -> None:
    """Requests are served oldest first.

    A request with other metadata under a used name waits. A request with a pin or metadata is exact.
    """

    def handle(pin: str | None = None, **metadata: str) -> SaveHandle:
        return SaveHandle(reason="test", pin=pin, metadata=metadata, waiter=lambda _handle, _timeout: None)

    first, plain, same, other = handle(loss="1"), handle(), handle(loss="1", epoch="2"), handle(loss="3")
    pins = [handle("best"), handle("best"), handle("epoch")]
    compatible, rest = split_compatible([first, plain, other, same, *pins])
    assert (compatible, rest) == ([first, plain, same, *pins], [other])
    flight = InFlightSave(snapshot_id=1, step=1, reason="test", handles=compatible)
    assert flight.metadata == {"loss": "1", "epoch": "2"}
    assert [each.exact for each in (plain, pins[0], first)] == [False, True, True]


def test_wait_for_a_running_comparison_is_bounded() -> None:
    """close() waits for a running comparison with live rows for a bounded time, and drops those not begun."""
    job: Future[None] = Future()
    comparison = Comparison(
        lambda _work: job, on_found=lambda: pytest.fail("a cancelled comparison reports nothing")
    )
    comparison.begin(InFlightSave(snapshot_id=1, step=1, reason="timer"), [(None, None)])  # type: ignore[list-item]
    found = comparison.result(time.monotonic())
    assert found is not None
    assert "did not finish in time" in found.failed
    assert job.cancelled()
