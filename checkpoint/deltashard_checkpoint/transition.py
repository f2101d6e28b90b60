"""State machines as transition tables, and their rendering as a reference page. Pure.

A table lists the legal events of every state and the resulting states. Any other event is a bug (`IllegalEvent`) and
is never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from deltashard_checkpoint.errors import InternalBug

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalEvent(InternalBug):
    """The transition table does not allow this event in this state."""


def after(table: Mapping[S, Mapping[E, S]], state: S, event: E, *, where: str) -> S:
    """Return the state after `event`; raises `IllegalEvent` if the table has no such transition."""
    to = table[state].get(event)
    if to is None:
        raise IllegalEvent(f"{event.value!r} in state {state.value}", where=where)
    return to


def page(title: str, source: str, table: Mapping[S, Mapping[E, S]], meaning: Mapping[E, str]) -> str:
    """Return a Markdown page with a mermaid diagram of the table and the meaning of its events.

    The table's first state is the initial state; `source` is the module from which the page is generated.
    """
    lines = [
        f"# {title}",
        "",
        f"For developers who read or change this code. Generated from `{source}` by `make reference`; do not edit.",
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
