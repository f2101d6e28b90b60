"""Runs the commands of a page: a test fails when a page does not work.

Every fenced `sh` block of a page is a step, run by bash from the root of the checkout, in the page's order; it fails when
one of its commands does. A fenced `text` block right after it is the expected output: its lines occur in this order
in the step's output. `...` matches any text, alone on a line any lines; runs of blanks are equal.
The line before a block that cannot run here gives the reason: `<!-- not run: why -->`. Commands run unchanged: what
differs between machines (KUBECONFIG, PATH, the registry behind an image's name) is outside of the page.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.machine import limit_s

_FENCE = re.compile(r"^```(\w*)\s*$")
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
ANYTHING = "..."


class PageError(Exception):
    """A page is written wrongly, or a step did not have the documented result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStep:
    """One block of commands."""

    line: int
    """Line of the page where the block begins."""
    commands: str
    expected: tuple[str, ...] = ()
    """Expected lines, in this order."""
    not_run: str = ""
    """Why the block is not run; empty when it is."""


def _blocks(text: str) -> Iterator[tuple[int, str, str, str]]:
    """(line, language, content, the last line of prose before it) of every fenced block."""
    lines = text.splitlines()
    before, at = "", 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            before = lines[at].strip() or before
            at += 1
            continue
        ends = next((n for n in range(at + 1, len(lines)) if lines[n].rstrip() == "```"), None)
        if ends is None:
            raise PageError(f"line {at + 1}: a block that does not end")
        yield at + 1, fence[1], "\n".join(lines[at + 1 : ends]), before
        before, at = "", ends + 1


def read(text: str) -> list[PageStep]:
    """The steps of a page; raises `PageError` for a block that would be neither run nor checked."""
    steps: list[PageStep] = []
    follows = False
    """Whether the block before was a step, with no prose in between."""
    for line, language, content, before in _blocks(text):
        reason = _NOT_RUN.match(before)
        if language == "sh":
            steps.append(PageStep(line=line, commands=content, not_run=reason[1] if reason else ""))
            follows = True
            continue
        if language == "text":
            if not follows or before:
                raise PageError(f"line {line}: this output belongs to no command: put it right after one")
            last = steps.pop()
            if last.not_run:
                raise PageError(f"line {line}: the output of a step that is not run cannot be checked")
            expected = tuple(each for each in content.splitlines() if each.strip())
            steps.append(PageStep(line=last.line, commands=last.commands, expected=expected))
        elif not language:
            raise PageError(f"line {line}: a block without a language")
        follows = False
    return steps


def missing(expected: tuple[str, ...], output: str) -> str | None:
    """The first expected line that the output lacks after those before it; None when all are there."""
    rest = iter([" ".join(line.split()) for line in output.splitlines()])
    for wanted in expected:
        line = " ".join(wanted.split())
        if line == ANYTHING:
            continue
        pattern = re.compile("".join(_word(each) for each in line.split()))
        if not any(pattern.fullmatch(f" {found}") for found in rest):
            return wanted
    return None


def _word(word: str) -> str:
    """The pattern of a word and the blank before it."""
    if word == ANYTHING:
        return "(?: .*)?"
    return " " + ".*".join(re.escape(part) for part in word.split(ANYTHING))


def run(
    steps: list[PageStep],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    done: Callable[[PageStep, str, float], None],
) -> None:
    """Run the steps; raises `PageError` with what a step printed.

    Args:
        steps: of one page.
        folder: the checkout.
        environment: the complete environment.
        timeout_s: for each step, on an idle machine.
        done: called after each step with its output and its seconds.
    """
    timeout_s = limit_s(timeout_s)
    for step in steps:
        if step.not_run:
            continue
        began_s = time.monotonic()
        command = ["bash", "-euo", "pipefail", "-c", step.commands]
        try:
            finished = subprocess.run(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output = (
                error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout
            )
            raise PageError(_step_error(step, f"took longer than {timeout_s:.0f} s", output or "")) from None
        if finished.returncode:
            raise PageError(_step_error(step, f"ended with {finished.returncode}", finished.stdout))
        lacks = missing(step.expected, finished.stdout)
        if lacks is not None:
            raise PageError(_step_error(step, f"did not print {lacks!r}", finished.stdout))
        done(step, finished.stdout, time.monotonic() - began_s)


def _step_error(step: PageStep, what: str, output: str) -> str:
    return f"the step of line {step.line} {what}:\n{step.commands}\n--- it printed:\n{output[-6000:]}"
