"""The list of namespaces that are watched."""

from __future__ import annotations

import pytest
from deltashard_operator import controller_main, main
from deltashard_operator.kube import watched_namespace

READERS = (main.read_options, controller_main.read_options)


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
    with pytest.raises(ValueError, match="is no namespace"):
        watched_namespace.listed(f"team-a,{text}")


def test_too_many_are_refused() -> None:
    """Each costs watches of its own."""
    names = [f"n{n}" for n in range(watched_namespace.MOST + 1)]
    assert len(watched_namespace.listed(",".join(names[:-1]))) == watched_namespace.MOST
    with pytest.raises(ValueError, match="name none, which watches all"):
        watched_namespace.listed(",".join(names))


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__module__)
def test_both_programs_take_it(read, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    """By flag and variable; nonsense ends them with a sentence."""
    variable = "DELTASHARD_WEBHOOK" if read is main.read_options else "DELTASHARD_CONTROLLER"
    assert read([], {}).watch_namespaces == ()
    assert read(["--watch-namespaces=a,b"], {}).watch_namespaces == ("a", "b")
    assert read([], {f"{variable}_WATCH_NAMESPACES": "c"}).watch_namespaces == ("c",)
    with pytest.raises(SystemExit):
        read(["--watch-namespaces=team-*"], {})
    assert "'team-*' is no namespace" in capsys.readouterr().err
