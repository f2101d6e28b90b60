"""Transition tables as data: what may happen in which state, and the page of the reference that shows it. Pure.

A table says for every state which events may happen and where they lead. An event that a state does not list is a bug
of ours (`IllegalEvent`), never silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from deltashard_checkpoint.errors import InternalBug

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalEvent(InternalBug):
    """The table has no arrow for this event in this state."""


def after(table: Mapping[S, Mapping[E, S]], state: S, event: E, *, where: str) -> S:
    """State after `event`; raises `IllegalEvent` when the table has no such arrow."""
    to = table[state].get(event)
    if to is None:
        raise IllegalEvent(f"{event.value!r} in state {state.value}", where=where)
    return to


def page(title: str, source: str, table: Mapping[S, Mapping[E, S]], meaning: Mapping[E, str]) -> str:
    """Page of the reference, in Markdown: a mermaid diagram of the table, and what its events mean.

    The table's first state is where a life begins; `source` is the module that the page is generated from.
    """
    lines = [
        f"# {title}",
        "",
        f"Generated from `{source}`; do not edit.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        f"    [*] --> {next(iter(table)).value}",
    ]
    for state, arrows in table.items():
        lines += [f"    {state.value} --> {to.value}: {event.value}" for event, to in arrows.items()]
        if all(to is state for to in arrows.values()):
            lines.append(f"    {state.value} --> [*]")
    lines += ["```", "", "| event | meaning |", "|---|---|"]
    lines += [f"| {event.value} | {text} |" for event, text in meaning.items()]
    return "\n".join(lines) + "\n"
