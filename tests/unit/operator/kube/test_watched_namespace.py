"""The list of watched namespaces."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import pytest
from deltashard_operator import controller_main, main
from deltashard_operator.kube import watched_namespace


def test_namespace_list_is_parsed() -> None:
    """Names are separated by commas and kept once, in order. An empty list means all namespaces."""
    assert watched_namespace.parse_namespaces("") == watched_namespace.parse_namespaces(" , ") == ()
    assert watched_namespace.parse_namespaces("team-b, team-a,team-b") == ("team-b", "team-a")
    assert watched_namespace.is_watched("any", ())
    assert watched_namespace.is_watched("team-a", ("team-a",))
    assert not watched_namespace.is_watched("team", ("team-a",))


TOO_MANY = ",".join(f"n{n}" for n in range(watched_namespace.MAX_NAMESPACES + 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"team-a,{bad}", "is not a namespace")
            for bad in ("Team", "team-*", "a.b", "-a", "a" * 64, "a b", "!a")
        ),
        (TOO_MANY, "leave the list empty to watch all"),
    ],
)
def test_malformed_namespace_list_is_refused(text: str, message: str) -> None:
    """Some of these are patterns in kopf, which would watch nothing. Each namespace has separate watches."""
    with pytest.raises(ArgumentTypeError, match=message):
        watched_namespace.parse_namespaces(text)


@pytest.mark.parametrize("program", [main, controller_main], ids=lambda program: program.PROGRAM)
def test_both_programs_accept_the_option(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def read(*argv: str) -> tuple[str, ...]:
        return tuple(main.options_of(program.Options, program.PROGRAM, argv).watch_namespaces)

    assert read("--watch-namespaces=a,b") == ("a", "b")
    with pytest.raises(SystemExit):
        read("--watch-namespaces=team-*")
    assert "'team-*' is not a namespace" in capsys.readouterr().err
