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
WEBHOOK = Terms(names=("webhook.ns.svc", "10.0.0.1"), leaf_s=90 * DAY_S, settle_s=30.0)
FLEET = Terms(names=("fleet.ns.svc",), leaf_s=90 * DAY_S, authority_s=3650 * DAY_S)


def verifies(leaf: bytes, bundle: bytes, now_s: float) -> bool:
    """As a client does, but for names: an authority of the bundle that is valid now signed the leaf."""
    return issuance.signed_by(leaf, issuance.bundle([bundle], [], now_s=now_s))


def expired(certificate: bytes, now_s: float) -> bool:
    return issuance.not_after_s(certificate) <= now_s


class Webhook:
    """The stored state, an issuer that may stop after any write, API servers and pods that lag."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.secret: Mapping[str, bytes] = {}
        self.bundles = [b"", b"not PEM"]
        self.since_s: float | None = None
        self.terms = WEBHOOK
        self.served: bytes | None = None
        """In the pods; whatever was stored within the last minutes."""

    def step(self) -> bool:
        coming = self.secret.get("next-ca.crt", b"")
        readable = bool(coming) and all(coming in each for each in self.bundles)
        self.since_s = (self.since_s or self.now_s) if readable else None
        published_s = None if self.since_s is None else self.now_s - self.since_s
        step = rotation.webhook_step(
            self.secret, self.bundles, self.terms, now_s=self.now_s, published_s=published_s
        )
        if step is None:
            return False
        assert (step.secret is None) != (step.bundle is None), "one write at a time"
        if step.secret is not None:
            self.secret = step.secret
        if step.bundle is not None:
            self.bundles = [step.bundle] * len(self.bundles)
        return True

    def look(self) -> None:
        for _ in range(10):
            if not self.step():
                return
        pytest.fail("the steps do not end")

    def assert_admits(self) -> None:
        """What pods serve, and what they will see next, verifies under every bundle."""
        for leaf in (self.served, self.secret.get("tls.crt")):
            if leaf is not None and not expired(leaf, self.now_s):
                assert all(verifies(leaf, each, self.now_s) for each in self.bundles)


def test_the_first_certificates_serve_at_once() -> None:
    """Nothing is preserved, so nothing waits; the key of the authority is nowhere; then there is peace."""
    world = Webhook()
    world.look()
    assert sorted(world.secret) == ["ca.crt", "tls.crt", "tls.key"]
    assert issuance.usable(world.secret["tls.crt"], world.secret["tls.key"], now_s=world.now_s)
    assert issuance.is_for(world.secret["tls.crt"], WEBHOOK.names)
    assert world.bundles == [world.secret["ca.crt"]] * 2
    assert not world.step()


def test_a_renewal_publishes_first_and_waits() -> None:
    """At two thirds, not before; the serving leaf changes only when the bundle was readable for `settle_s`."""
    world = Webhook()
    world.look()
    first = dict(world.secret)
    world.now_s += 59 * DAY_S
    assert not world.step()
    world.now_s += 2 * DAY_S
    world.look()
    assert world.secret["tls.crt"] == first["tls.crt"]
    assert len(issuance.parse(world.bundles[0])) == 2
    world.now_s += 29
    assert not world.step()
    world.now_s += 1
    world.look()
    assert world.secret["tls.crt"] != first["tls.crt"]
    assert sorted(world.secret) == ["ca.crt", "tls.crt", "tls.key"]
    assert first["ca.crt"] in world.bundles[0], "the old authority stays while a leaf of it is valid"
    world.now_s += 30 * DAY_S
    world.look()
    assert world.bundles == [world.secret["ca.crt"]] * 2


def test_a_wiped_bundle_is_written_again_and_a_strangers_authority_stays() -> None:
    """By an upgrade of the chart, say; and what somebody added while it is valid is left."""
    world = Webhook()
    world.look()
    stranger = issuance.authority("stranger", now_s=world.now_s, lasts_s=DAY_S).certificate
    world.bundles = [b"", stranger]
    world.look()
    assert all(world.secret["ca.crt"] in each and stranger in each for each in world.bundles)


@pytest.mark.parametrize("broken", ["tls.crt", "tls.key", "ca.crt"])
def test_a_damaged_secret_is_replaced_at_once(broken: str) -> None:
    """Nothing usable serves; the bundle still goes first."""
    world = Webhook()
    world.look()
    world.secret = {**world.secret, broken: b"damaged"}
    assert world.step()
    assert world.step()
    assert world.secret[broken] == b"damaged", "the bundle goes first"
    assert world.secret["next-ca.crt"] in world.bundles[0]
    world.look()
    assert issuance.usable(world.secret["tls.crt"], world.secret["tls.key"], now_s=world.now_s)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("days"), st.floats(0.001, 45)),
        st.tuples(st.just("seconds"), st.floats(0, 60)),
        st.tuples(st.just("look"), st.integers(1, 10)),
        st.tuples(st.just("pods see the Secret"), st.none()),
        st.tuples(st.just("names"), st.integers(0, 3)),
        st.tuples(st.just("controller starts anew"), st.none()),
        st.tuples(st.just("one bundle wiped"), st.none()),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(EVENTS)
@settings(deadline=None, max_examples=60)
def test_whatever_serves_verifies(events: list[tuple[str, float | None]]) -> None:
    """Looks broken off anywhere, pods that see a Secret late or never, options that change: no handshake fails.

    But for what no issuer can help: pods that serve what has expired since. What the wiped bundle of one webhook held
    is still in the other's.
    """
    world = Webhook()
    world.look()
    world.served = world.secret["tls.crt"]
    for what, value in events:
        if what in {"days", "seconds"}:
            world.now_s += (value or 0) * (DAY_S if what == "days" else 1)
        elif what == "look":
            for _ in range(int(value or 0)):
                world.step()
        elif what == "pods see the Secret":
            world.served = world.secret["tls.crt"]
        elif what == "names":
            world.terms = dataclasses.replace(WEBHOOK, names=(*WEBHOOK.names, f"n{value}.example"))
        elif what == "controller starts anew":
            world.since_s = None
        else:
            world.bundles[0] = b""
            world.look()
        if len(issuance.parse(world.bundles[1])) < issuance.MAX_BUNDLE:
            world.assert_admits()
    world.look()
    world.now_s += WEBHOOK.settle_s
    world.look()
    world.now_s += WEBHOOK.settle_s
    world.look()
    assert not world.step(), "there is an end to it"
    assert issuance.is_for(world.secret["tls.crt"], world.terms.names)
    assert not issuance.aging(world.secret["tls.crt"], now_s=world.now_s)


class Fleet:
    """The stored state of the fleet's certificates."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.authority: Mapping[str, bytes] = {}
        self.secret: Mapping[str, bytes] = {}
        self.bundle = b""
        self.issued: list[str] = []

    def step(self) -> bool:
        step = rotation.fleet_step(self.authority, self.secret, self.bundle, FLEET, now_s=self.now_s)
        if step is None:
            return False
        self.authority = self.authority if step.authority is None else step.authority
        self.secret = self.secret if step.secret is None else step.secret
        self.bundle = self.bundle if step.bundle is None else step.bundle
        self.issued += [step.issued] if step.issued else []
        return True

    def look(self) -> None:
        for _ in range(10):
            if not self.step():
                return
        pytest.fail("the steps do not end")


@pytest.mark.slow
def test_a_pod_is_served_for_years_and_the_authority_has_a_successor_in_time() -> None:
    """Twenty-five years, a look a fortnight: every pod up to two and a half years old has a leaf that it can verify."""
    world = Fleet()
    pods: list[tuple[float, bytes]] = []
    authorities = set()
    while world.now_s < START_S + 25 * 365 * DAY_S:
        world.look()
        authorities.add(world.authority["ca.crt"])
        pods = [each for each in pods if world.now_s - each[0] < 2.5 * 365 * DAY_S]
        pods.append((world.now_s, world.bundle))
        assert issuance.usable(world.secret["tls.crt"], world.secret["tls.key"], now_s=world.now_s)
        for _, bundle in pods[:: max(1, len(pods) // 8)]:
            assert verifies(world.secret["tls.crt"], bundle, world.now_s)
        world.now_s += 14 * DAY_S
    assert len(authorities) == 4
    assert len(issuance.parse(world.bundle)) <= 3


def test_an_authority_without_its_key_hands_over_at_the_next_leaf() -> None:
    """The way to rotate now: pods of yesterday and pods of today are both served until the leaf is renewed."""
    world = Fleet()
    world.look()
    yesterday, leaf = world.bundle, world.secret["tls.crt"]
    world.authority = {key: value for key, value in world.authority.items() if key != "ca.key"}
    world.look()
    assert world.secret["tls.crt"] == leaf
    assert verifies(leaf, yesterday, world.now_s)
    assert verifies(leaf, world.bundle, world.now_s)
    assert len(issuance.parse(world.bundle)) == 2
    world.now_s += 61 * DAY_S
    world.look()
    assert not verifies(world.secret["tls.crt"], yesterday, world.now_s)
    assert verifies(world.secret["tls.crt"], world.bundle, world.now_s)
    assert world.issued == ["fleet_authority", "fleet", "fleet_authority", "fleet"]


def test_a_lost_leaf_comes_from_the_same_authority() -> None:
    """And a lost authority takes a good leaf nowhere."""
    world = Fleet()
    world.look()
    bundle, leaf = world.bundle, world.secret["tls.crt"]
    world.secret = {}
    world.look()
    assert world.bundle == bundle
    assert verifies(world.secret["tls.crt"], bundle, world.now_s)
    leaf = world.secret["tls.crt"]
    world.authority = {}
    world.look()
    assert world.secret["tls.crt"] == leaf
    assert verifies(leaf, world.bundle, world.now_s)


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
