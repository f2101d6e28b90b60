"""Which asked-for saves one cut can satisfy."""

from __future__ import annotations

from deltashard.save.handle import Flight, SaveHandle, together


def handle(pin: str | None = None, **metadata: str) -> SaveHandle:
    return SaveHandle(reason="test", pin=pin, metadata=metadata, waiter=lambda _handle, _timeout: None)


def test_a_cut_takes_all_whose_metadata_agrees() -> None:
    """Oldest first; who says something else under a name that is taken waits for a cut of its own."""
    first, plain, same, other = handle(loss="1"), handle(), handle(loss="1", epoch="2"), handle(loss="3")
    taken, rest = together([first, plain, other, same])
    assert (taken, rest) == ([first, plain, same], [other])
    flight = Flight(cut=1, step=1, reason="test", handles=taken)
    assert flight.metadata == {"loss": "1", "epoch": "2"}


def test_a_cut_takes_several_pins() -> None:
    handles = [handle("best"), handle("best"), handle("epoch"), handle()]
    assert together(handles) == (handles, [])


def test_what_makes_a_save_exact() -> None:
    """Something that was said of one model."""
    assert [h.exact for h in (handle(), handle("best"), handle(loss="1"))] == [False, True, True]
