"""What is told of objects that bear one name after each other: kopf keeps the order of each UID, and no other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deltashard_operator.kube.object_watch import ObjectKey, ObjectWatch, WatchedKind
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client

NAMES = ("a", "b")
Document = dict[str, Any]


class Event(NamedTuple):
    """One change of one object."""

    what: str
    name: str
    uid: str
    version: int

    @property
    def document(self) -> Document:
        metadata = {"namespace": "n", "name": self.name, "uid": self.uid}
        return {"metadata": {**metadata, "resourceVersion": str(self.version)}}


@dataclass
class Listener:
    """Who is told, and what it makes of it by UID and by name."""

    told: list[tuple[str, str]] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    """UID -> version, of those that are there."""
    names: dict[str, str] = field(default_factory=dict)
    """Name -> UID, kept as who knows objects by name keeps them."""

    def take(self, document: Document) -> None:
        metadata = document["metadata"]
        self.told.append(("there", metadata["uid"]))
        self.versions[metadata["uid"]] = int(metadata["resourceVersion"])
        self.names[metadata["name"]] = metadata["uid"]

    def drop(self, key: ObjectKey, last: Document | None) -> None:
        self.told.append(("gone" if last is not None else "unseen", key.uid))
        self.versions.pop(key.uid, None)
        self.names.pop(key.name, None)


class Told:
    """An `ObjectWatch` without kopf, with one listener by UID and one by name."""

    def __init__(self) -> None:
        self.by_uid, self.by_name = Listener(), Listener()
        self.kinds = (
            WatchedKind("by uid", "/api/v1/pods", self.by_uid.take, self.by_uid.drop),
            WatchedKind("by name", "/api/v1/nodes", self.by_name.take, self.by_name.drop, by_name=True),
        )
        self.errors: Counter[tuple[str, str]] = Counter()
        self.watch = ObjectWatch(
            client.ApiClient(), self.kinds, on_list=lambda: None, count=lambda *of: self.errors.update((of,))
        )

    def event(self, event: Event) -> None:
        for kind in self.kinds:
            self.watch._take(kind, event.what, event.document)

    def page(self, version: int, *there: Event, first: bool = True, last: bool = True) -> None:
        metadata = {"resourceVersion": str(version), **({} if last else {"continue": "more"})}
        page = {"metadata": metadata, "items": [each.document for each in there]}
        for kind in self.kinds:
            self.watch._take_page(kind, page, first)


def changed(what: str, uid: str, version: int) -> Event:
    return Event(what, "a", uid, version)


def test_the_end_of_one_does_not_end_the_next_of_its_name() -> None:
    """As kopf hands on a chunk of three: the second of the first object comes after the first of the second."""
    told = Told()
    told.page(1, changed("", "A", 1))
    told.event(changed("MODIFIED", "A", 2))
    told.event(changed("ADDED", "B", 4))
    told.event(changed("DELETED", "A", 3))
    assert told.by_name.names == {"a": "B"}
    assert told.by_uid.told == [("there", "A"), ("there", "A"), ("there", "B"), ("gone", "A")]
    told.event(changed("DELETED", "B", 5))
    assert told.by_name.names == {}
    assert told.by_name.told == [("there", "A"), ("there", "A"), ("there", "B"), ("gone", "B")]
    assert told.by_uid.told[-1] == ("gone", "B")


def test_a_list_makes_what_happened_before_it_no_news() -> None:
    """Changes that kopf still held when the list came: one of what went unseen, one of an older state."""
    told = Told()
    told.page(2, changed("", "A", 1), Event("", "b", "B", 2))
    told.page(9, Event("", "b", "B", 8))
    told.event(changed("MODIFIED", "A", 3))
    told.event(changed("DELETED", "A", 4))
    told.event(Event("MODIFIED", "b", "B", 5))
    assert told.by_uid.told[2:] == [("there", "B"), ("unseen", "A")]
    assert told.by_uid.versions == {"B": 8}


def test_what_is_not_chosen_any_more_is_gone_and_may_come_again() -> None:
    """A label was taken away and given back: the API says DELETED, then ADDED, of the same UID."""
    told = Told()
    told.page(1, changed("", "A", 1))
    for each in (changed("DELETED", "A", 2), changed("ADDED", "A", 3)):
        told.event(each)
    for each in (told.by_uid, told.by_name):
        assert each.told == [("there", "A"), ("gone", "A"), ("there", "A")]


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Objects of two names, each made, changed and deleted again and again."""
    found: list[Event] = []
    there: dict[str, str] = {}
    for version in range(1, draw(st.integers(1, 20)) + 1):
        name = draw(st.sampled_from(NAMES))
        if name not in there:
            there[name], what = f"{name}{version}", "ADDED"
        else:
            what = draw(st.sampled_from(("MODIFIED", "DELETED")))
        found.append(Event(what, name, there[name], version))
        if what == "DELETED":
            del there[name]
    return found


def states(history: list[Event]) -> dict[str, Event]:
    """The newest state of what is there, by name."""
    found: dict[str, Event] = {}
    for event in history:
        found[event.name] = event
        if event.what == "DELETED":
            del found[event.name]
    return found


@given(st.data(), histories())
def test_what_is_known_becomes_what_is_there_in_whatever_order_it_comes(
    data: st.DataObject, history: list[Event]
) -> None:
    """Besides, a list comes once in pages, after what a watch missed; kopf may hold back what it saw before it."""
    listed_at = data.draw(st.integers(0, len(history)), label="the list's version")
    seen = data.draw(st.integers(0, listed_at), label="the version up to which a watch saw all")
    listed = list(states(history[:listed_at]).values())
    size = data.draw(st.integers(1, 2), label="objects in a page")
    pages = [listed[at : at + size] for at in range(0, len(listed), size)] or [[]]
    left: dict[str, list[Event]] = {}
    for event in (*history[:seen], *history[listed_at:]):
        left.setdefault(event.uid, []).append(event)
    truth, told, paged = states(history), Told(), 0
    told.page(0)
    living: set[str] = set()
    while left or paged < len(pages):
        may = [uid for uid, events in left.items() if paged == len(pages) or events[0].version <= listed_at]
        if paged < len(pages):
            may.append("list")
        uid = data.draw(st.sampled_from(may), label="next")
        if uid == "list":
            told.page(listed_at, *pages[paged], first=paged == 0, last=paged == len(pages) - 1)
            paged += 1
        else:
            told.event(left[uid].pop(0))
            left = {each: events for each, events in left.items() if events}
        living |= {each.uid for each in truth.values()} & set(told.by_name.names.values())
        assert living <= set(told.by_name.names.values())  # once told, never lost

    assert told.by_name.names == {name: event.uid for name, event in truth.items()}
    assert told.by_uid.versions == {event.uid: event.version for event in truth.values()}
    for uid in {uid for _, uid in told.by_uid.told}:
        words = [what for what, of in told.by_uid.told if of == uid]
        ends = [at for at, what in enumerate(words) if what != "there"]
        assert ends == ([] if uid in told.by_uid.versions else [len(words) - 1])
        assert words[0] == "there"
    assert not any(what == "error" for what, _ in told.errors)


def test_a_list_of_one_namespace_says_nothing_of_another() -> None:
    """Neither what is gone, nor that all is listed; cluster-scoped kinds are listed once."""
    found, lists = Listener(), []
    pods = WatchedKind("pods", "/api/v1/pods", found.take, found.drop)
    nodes = WatchedKind("nodes", "/api/v1/nodes", found.take, found.drop, namespaced=False)
    watch = ObjectWatch(
        client.ApiClient(), (pods, nodes), namespaces=("n", "m"), on_list=lambda: lists.append(1)
    )
    in_n, in_m = pods.within("n"), pods.within("m")
    assert in_n.path == "/api/v1/namespaces/n/pods"
    assert pods.within("m").on_object == pods.on_object

    def page(kind: WatchedKind, version: int, *there: Event, namespace: str = "n") -> None:
        items = [each.document for each in there]
        for item in items:
            item["metadata"]["namespace"] = namespace
        metadata = {"resourceVersion": str(version)}
        watch._take_page(kind, {"metadata": metadata, "items": items}, True)

    page(in_n, 1, Event("", "a", "A", 1))
    page(in_m, 2, Event("", "a", "B", 2), namespace="m")
    assert not lists, "the nodes are not listed yet"
    page(nodes, 3)
    assert lists == [1]
    page(in_n, 5)
    assert found.versions == {"B": 2}, "m's is there as it was"
    watch._take(in_m, "MODIFIED", Event("", "a", "B", 4).document)
    assert found.versions == {"B": 4}, "the list of n is no news of m"
