"""SIGTERM after the urgent save: also as process 1 of a container, with several handlers, and with forked children."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from deltashard.attach.term_signal import TermHandler

PROGRAM = """
import os, signal, sys
from deltashard.attach.term_signal import TermHandler

notified = []
handler = TermHandler(grace_s=lambda: 60.0, notice=lambda: notified.append(True))
assert handler.install()
signal.raise_signal(signal.SIGTERM)
assert notified and handler.remaining_s > 0
print("saved", os.getpid())
handler.chain()
print("still here")
sys.exit(0)
"""


def run_program(code: str, *prefix: str) -> tuple[int, str]:
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout


def test_process_ends_even_as_pid_1() -> None:
    """The default action ends the process. Process 1 ignores it and therefore exits with 143 and loses no output."""
    code, text = run_program(PROGRAM)
    assert code == -signal.SIGTERM
    assert "still here" not in text
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no new pid namespace can be made here (unshare)")
    assert run_program(PROGRAM, *unshare) == (143, "saved 1\n")


CHILD = """
import os, signal
from deltashard.attach.term_signal import TermHandler

first, second = (TermHandler(grace_s=lambda: 60.0, notice=lambda: None) for _ in range(2))
assert first.install() and second.install()
pid = os.fork()
if pid == 0:
    signal.raise_signal(signal.SIGTERM)  # the default action is back: this is the end
    os._exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert status == -signal.SIGTERM, status
assert signal.getsignal(signal.SIGTERM) == second._on_term and first.until_s is None
print("parent untouched")
"""


def test_forked_child_has_previous_handler() -> None:
    """The child ends immediately. The parent keeps the library's handler."""
    assert run_program(CHILD) == (0, "parent untouched\n")


@pytest.fixture
def received() -> Iterator[list[str]]:
    signals: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: signals.append("user"))
    yield signals
    signal.signal(signal.SIGTERM, before)


def installed(notice: Callable[[], None]) -> TermHandler:
    handler = TermHandler(grace_s=lambda: 600.0, notice=notice)
    assert handler.install()
    return handler


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1)])
def test_handlers_are_removed_in_any_order(received: list[str], order: tuple[int, int, int]) -> None:
    """The newest remaining handler gets the signal and forwards it to the others. A closed one gets none."""
    users = signal.getsignal(signal.SIGTERM)
    handlers = [installed(lambda n=n: received.append(str(n))) for n in range(3)]
    handlers[order[0]].remove()
    signal.raise_signal(signal.SIGTERM)
    left = sorted(order[1:], reverse=True)
    assert received == [str(left[0])]
    handlers[left[0]].chain()
    assert received == [str(n) for n in left]
    handlers[left[1]].chain()
    assert received == [*(str(n) for n in left), "user"]
    assert signal.getsignal(signal.SIGTERM) is users


def test_removed_handler_under_foreign_one_forwards_signal(received: list[str]) -> None:
    """A foreign handler was installed later and calls the library's handler, which is then closed."""
    handler = installed(lambda: received.append("ours"))
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)
    signal.signal(signal.SIGTERM, lambda number, frame: (received.append("foreign"), ours(number, frame)))
    handler.remove()
    signal.raise_signal(signal.SIGTERM)
    assert received == ["foreign", "user"]
