"""The order in which certificates change: simulated over years, with everything that lags lagging."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from deltashard_operator.tls import issuance, rotation
from deltashard_operator.tls.rotation import Terms
from hypothesis import given, settings
from hypothesis import strategies as st

DAY_S = 86400.0
START_S = 1_800_000_000.0
TERMS = Terms(
    names=("webhook.ns.svc", "fleet.ns.svc", "10.0.0.1"), leaf_s=90 * DAY_S, authority_s=3650 * DAY_S
)


def verifies(leaf: bytes, bundle: bytes, now_s: float) -> bool:
    """As a client does, but for names: an authority of the bundle that is valid now signed the leaf."""
    return issuance.signed_by(leaf, issuance.bundle([bundle], [], now_s=now_s))


class World:
    """What is stored, and an issuer that may stop after any write."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.secret: Mapping[str, bytes] = {}
        self.bundles = [b"", b"not PEM"]
        self.terms = TERMS
        self.issued: list[str] = []

    @property
    def leaf(self) -> bytes:
        return self.secret["tls.crt"]

    def step(self) -> bool:
        step = rotation.next_step(self.secret, self.bundles, self.terms, now_s=self.now_s)
        if step is None:
            return False
        assert (step.secret is None) != (step.bundle is None), "one write at a time"
        self.secret = self.secret if step.secret is None else step.secret
        self.bundles = self.bundles if step.bundle is None else [step.bundle] * len(self.bundles)
        self.issued += [step.issued] if step.issued else []
        return True

    def check(self) -> None:
        for _ in range(10):
            if not self.step():
                return
        pytest.fail("the steps do not end")


@pytest.fixture
def world() -> World:
    world = World()
    world.check()
    return world


def test_the_first_certificates(world: World) -> None:
    """An authority, its bundle everywhere, one leaf for all names; then there is peace."""
    assert world.issued == ["authority", "leaf"]
    assert sorted(world.secret) == ["ca.crt", "ca.key", "tls.crt", "tls.key"]
    assert rotation.serves(world.secret, now_s=world.now_s)
    assert issuance.is_for(world.leaf, TERMS.names)
    assert world.bundles == [world.secret["ca.crt"]] * 2
    assert not world.step()


def test_a_leaf_is_renewed_at_two_thirds_or_for_other_names(world: World) -> None:
    """By the same authority: no bundle changes."""
    first, bundles = world.leaf, world.bundles
    world.now_s += 59 * DAY_S
    assert not world.step()
    world.now_s += 2 * DAY_S
    world.check()
    second = world.leaf
    assert second != first
    world.terms = dataclasses.replace(TERMS, names=("another.example",))
    world.check()
    assert issuance.is_for(world.leaf, ("another.example",))
    assert world.bundles == bundles
    assert world.issued == ["authority", "leaf", "leaf", "leaf"]


def test_a_wiped_bundle_is_written_again_and_a_strangers_authority_stays(world: World) -> None:
    """By an upgrade of the chart, say; and what somebody added while it is valid is left."""
    stranger = issuance.authority("stranger", now_s=world.now_s, lasts_s=DAY_S).certificate
    world.bundles = [b"", stranger]
    world.check()
    assert all(world.secret["ca.crt"] in each and stranger in each for each in world.bundles)


@pytest.mark.parametrize(
    "lost", ["tls.crt", "tls.key", "ca.crt", "ca.key", "ca.crt ca.key", "tls.crt tls.key"]
)
def test_what_is_lost_or_damaged_is_made_anew(world: World, lost: str) -> None:
    """A lost leaf comes from the same authority; a lost authority takes a good leaf nowhere."""
    before, bundle = world.leaf, world.bundles[0]
    world.secret = {**world.secret, **dict.fromkeys(lost.split(), b"damaged")}
    world.check()
    assert rotation.serves(world.secret, now_s=world.now_s)
    assert all(verifies(world.leaf, each, world.now_s) for each in world.bundles)
    assert (world.leaf == before) == lost.startswith("ca")
    assert verifies(world.leaf, bundle, world.now_s)
    assert (world.bundles[0] == bundle) != lost.startswith("ca")


def test_an_authority_without_its_key_hands_over_at_the_next_leaf(world: World) -> None:
    """The way to rotate now: pods of yesterday and pods of today are both served until the leaf is renewed."""
    yesterday, leaf = world.bundles[0], world.leaf
    world.secret = {key: value for key, value in world.secret.items() if key != "ca.key"}
    world.check()
    assert world.leaf == leaf
    assert len(issuance.parse(world.bundles[0])) == 2
    world.now_s += 61 * DAY_S
    world.check()
    assert not verifies(world.leaf, yesterday, world.now_s)
    assert verifies(world.leaf, world.bundles[0], world.now_s)


@pytest.mark.slow
def test_a_pod_is_served_for_years_and_the_authority_has_a_successor_in_time(world: World) -> None:
    """Twenty-five years, a check a fortnight: every pod up to two and a half years old can verify the leaf."""
    pods: list[tuple[float, bytes]] = []
    authorities = set()
    while world.now_s < START_S + 25 * 365 * DAY_S:
        world.check()
        authorities.add(world.secret["ca.crt"])
        pods = [each for each in pods if world.now_s - each[0] < 2.5 * 365 * DAY_S]
        pods.append((world.now_s, world.bundles[0]))
        assert rotation.serves(world.secret, now_s=world.now_s)
        for _, bundle in pods[:: max(1, len(pods) // 8)]:
            assert verifies(world.leaf, bundle, world.now_s)
        world.now_s += 14 * DAY_S
    assert len(authorities) == 4
    assert len(issuance.parse(world.bundles[0])) <= 3


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("days"), st.floats(0.001, 45)),
        st.tuples(st.just("steps"), st.integers(1, 5)),
        st.tuples(st.just("pods see the Secret"), st.none()),
        st.tuples(st.just("names"), st.integers(0, 3)),
        st.tuples(st.just("authority's key is lost"), st.none()),
        st.tuples(st.just("one bundle wiped"), st.none()),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(EVENTS)
@settings(deadline=None, max_examples=60)
def test_whatever_serves_verifies(events: list[tuple[str, float | None]]) -> None:
    """Checks broken off anywhere, pods that see a Secret late or never, options that change: no handshake fails.

    But for what no issuer can help: pods that serve what has expired since.
    """
    world = World()
    world.check()
    served = world.leaf
    for what, value in events:
        if what == "days":
            world.now_s += (value or 0) * DAY_S
        elif what == "steps":
            for _ in range(int(value or 0)):
                world.step()
        elif what == "pods see the Secret":
            served = world.leaf
        elif what == "names":
            world.terms = dataclasses.replace(TERMS, names=(*TERMS.names, f"n{value}.example"))
        elif what == "authority's key is lost":
            world.secret = {**world.secret, "ca.key": b""}
        else:
            world.bundles = [b"", world.bundles[1]]
            world.check()
        if len(issuance.parse(world.bundles[1])) < issuance.MAX_BUNDLE:
            for leaf in (served, world.leaf):
                if issuance.not_after_s(leaf) > world.now_s:
                    assert all(verifies(leaf, each, world.now_s) for each in world.bundles)
    world.check()
    assert issuance.is_for(world.leaf, world.terms.names)
    assert not issuance.aging(world.leaf, now_s=world.now_s)


def test_leaves_do_not_outlive_their_signer_and_judge_their_names() -> None:
    """Names and addresses, each as what it is."""
    signer = issuance.authority("short", now_s=START_S, lasts_s=10 * DAY_S)
    leaf = issuance.leaf(signer, ["a.example", "127.0.0.1", "::1"], now_s=START_S, lasts_s=90 * DAY_S)
    assert issuance.not_after_s(leaf.certificate) == issuance.not_after_s(signer.certificate)
    assert issuance.is_for(leaf.certificate, ["::1", "127.0.0.1", "a.example"])
    assert not issuance.is_for(leaf.certificate, ["a.example"])
    assert not issuance.is_for(signer.certificate, ["a.example"])
    assert not issuance.usable(leaf.certificate, signer.key, now_s=START_S)
    assert not issuance.usable(leaf.certificate, b"", now_s=START_S)
    other = issuance.authority("short", now_s=START_S, lasts_s=10 * DAY_S)
    assert not issuance.signed_by(leaf.certificate, other.certificate)
    assert issuance.signed_by(leaf.certificate, other.certificate + signer.certificate)


def test_a_bundle_has_an_end_and_keeps_ours() -> None:
    """The oldest strangers go first, the expired ones always."""
    made = [
        issuance.authority("a", now_s=START_S + number, lasts_s=DAY_S).certificate for number in range(12)
    ]
    ours, others = made[:1], made[1:]
    kept = issuance.bundle(ours, others, now_s=START_S + 20)
    assert len(issuance.parse(kept)) == issuance.MAX_BUNDLE
    assert made[0] in kept
    assert made[1] not in kept
    assert made[11] in kept
    assert issuance.bundle(ours, [kept], now_s=START_S + 20) == kept
    assert issuance.bundle(ours, [kept], now_s=START_S + 2 * DAY_S) == b""
