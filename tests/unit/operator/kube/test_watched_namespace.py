"""The list of namespaces that are watched."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import pytest
from deltashard_operator import controller_main, main
from deltashard_operator.kube import watched_namespace


def test_a_list() -> None:
    """By commas, each once, in order; nothing is everything."""
    assert watched_namespace.listed("") == watched_namespace.listed(" , ") == ()
    assert watched_namespace.listed("team-b, team-a,team-b") == ("team-b", "team-a")
    assert watched_namespace.is_watched("any", ())
    assert watched_namespace.is_watched("team-a", ("team-a",))
    assert not watched_namespace.is_watched("team", ("team-a",))


@pytest.mark.parametrize("text", ["Team", "team-*", "a.b", "-a", "a-", "a" * 64, "a b", "!a"])
def test_what_is_no_namespace_is_named(text: str) -> None:
    """To kopf some of these would be patterns, and it would watch nothing."""
    with pytest.raises(ArgumentTypeError, match="is no namespace"):
        watched_namespace.listed(f"team-a,{text}")


def test_too_many_are_refused() -> None:
    """Each costs watches of its own."""
    names = [f"n{n}" for n in range(watched_namespace.MOST + 1)]
    assert len(watched_namespace.listed(",".join(names[:-1]))) == watched_namespace.MOST
    with pytest.raises(ArgumentTypeError, match="name none, which watches all"):
        watched_namespace.listed(",".join(names))


@pytest.mark.parametrize("program", [main, controller_main], ids=lambda program: program.PROGRAM)
def test_both_programs_take_it(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Nonsense ends them with a sentence."""

    def read(*argv: str) -> tuple[str, ...]:
        return tuple(main.options_of(program.Options, program.PROGRAM, argv).watch_namespaces)

    assert read() == ()
    assert read("--watch-namespaces=a,b") == ("a", "b")
    with pytest.raises(SystemExit):
        read("--watch-namespaces=team-*")
    assert "'team-*' is no namespace" in capsys.readouterr().err
