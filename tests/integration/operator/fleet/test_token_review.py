"""Token reviews: what is believed, what is remembered, and what happens when the API is slow or gone."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from deltashard_operator.fleet import token_review
from deltashard_operator.fleet.token_review import (
    NotAuthentic,
    PodIdentity,
    Reviewer,
    ReviewUnavailable,
    TooManyReviews,
    expires_at_s,
    identity_of,
)
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client

from tests.support.server.faulty_proxy import FaultyProxy, FixedAnswers
from tests.support.server.minio_server import free_port

AUDIENCE = "deltashard-fleet"
USER: dict[str, Any] = {
    "username": "system:serviceaccount:team-a:default",
    "extra": {
        "authentication.kubernetes.io/pod-name": ["train-0"],
        "authentication.kubernetes.io/pod-uid": ["u-1"],
    },
}
GOOD: dict[str, Any] = {"authenticated": True, "user": USER, "audiences": [AUDIENCE]}


def status(**changes: Any) -> dict[str, Any]:
    return GOOD | changes


def token(**claims: Any) -> str:
    """One that has the form of a pod's for us."""
    claims = {"aud": [AUDIENCE], "kubernetes.io": {"pod": {"name": "train-0", "uid": "u-1"}}} | claims
    parts = (json.dumps(part).encode() for part in ({"alg": "none"}, claims))
    return ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "s"])


@contextmanager
def answering(document: dict[str, Any], code: int = 201) -> Iterator[FixedAnswers]:
    """An API with one answer to every review."""
    headers = {"Content-Type": "application/json"}
    with FixedAnswers(code, body(document), headers) as server:
        yield server


def body(document: dict[str, Any]) -> bytes:
    """A review with this status."""
    found = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": "t"}}
    return json.dumps(found | {"status": document}).encode()


class World:
    """A reviewer at a port, its clocks and its counts."""

    def __init__(self, port: int) -> None:
        self.now_s = 1000.0
        self.counts: Counter[tuple[str, str]] = Counter()
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        configuration.retries = False
        self.reviewer = Reviewer(
            client.ApiClient(configuration),
            count=lambda outcome, source: self.counts.update([(outcome, source)]),
            monotonic=lambda: self.now_s,
            unix=lambda: self.now_s + 1e9,
        )


def test_only_a_bound_token_for_us_is_believed() -> None:
    """Everything that may be missing, is missing once."""
    assert identity_of(status(), AUDIENCE) == PodIdentity(namespace="team-a", pod="train-0", pod_uid="u-1")
    extra = USER["extra"]
    for changes in (
        {"authenticated": False, "error": "expired"},
        {"authenticated": None},
        {"user": None},
        {"audiences": None},
        {"audiences": ["another"]},
        {"user": USER | {"username": "system:node:n1"}},
        {"user": USER | {"username": "system:serviceaccount:team-a"}},
        {"user": USER | {"extra": None}},
        *({"user": USER | {"extra": {key: value}}} for key, value in extra.items()),
        {"user": USER | {"extra": {key: [""] for key in extra}}},
        {"user": USER | {"extra": {key: [] for key in extra}}},
    ):
        assert isinstance(identity_of(status(**changes), AUDIENCE), NotAuthentic), changes
    assert isinstance(identity_of(None, AUDIENCE), NotAuthentic)


@given(
    st.text(max_size=60) | st.builds(lambda value: token(exp=value), st.integers() | st.text() | st.none())
)
def test_any_token_has_an_expiry_or_none(text: str) -> None:
    """Tokens are not ours to trust before the API has spoken, nor to stumble over after."""
    assert isinstance(expires_at_s(text, 1.0), float)
    assert expires_at_s(token(exp=17), 1.0) == 17.0


def test_good_answers_are_kept_until_the_token_expires() -> None:
    """By the shorter of both; then the API is asked again."""

    async def scenario(server: FixedAnswers) -> None:
        world = World(server.port)
        for expiry_s, lasts_s in (
            (world.now_s + 1e9 + 60, 60.0),
            (world.now_s + 1e9 + 9999, token_review.GOOD_S),
        ):
            begun_s, before = world.now_s, server.requests
            sent = token(exp=expiry_s)
            for moment_s in (0.0, lasts_s - 1):
                world.now_s = begun_s + moment_s
                assert (await world.reviewer.review(sent)).pod == "train-0"
                assert server.requests == before + 1
            world.now_s = begun_s + lasts_s
            await world.reviewer.review(sent)
            assert server.requests == before + 2
            world.now_s = begun_s
        assert world.counts == {("authentic", "api"): 4, ("authentic", "cache"): 2}
        world.reviewer.close()

    with answering(GOOD) as server:
        asyncio.run(scenario(server))


def test_bad_answers_are_kept_for_a_moment() -> None:
    """A sidecar with a bad token that comes again and again costs little; nonsense costs nothing."""

    async def scenario(server: FixedAnswers) -> None:
        world = World(server.port)
        for _ in range(3):
            with pytest.raises(NotAuthentic):
                await world.reviewer.review(token())
        assert server.requests == 1
        world.now_s += token_review.BAD_S
        with pytest.raises(NotAuthentic):
            await world.reviewer.review(token())
        assert server.requests == 2
        nonsense = [
            *("", "ü", "x" * (token_review.MAX_TOKEN + 1), "garbage", "a.b.c", "..", "a.W10.c"),
            *(token(aud="another"), token(aud=None), token(**{"kubernetes.io": {}})),
        ]
        for each in nonsense:
            with pytest.raises(NotAuthentic):
                await world.reviewer.review(each)
        assert server.requests == 2
        assert world.counts["refused", "none"] == len(nonsense)
        world.reviewer.close()

    with answering({"authenticated": False}) as server:
        asyncio.run(scenario(server))


@pytest.mark.parametrize(("code", "document"), [(403, {}), (500, {}), (429, {}), (404, {})])
def test_an_api_that_refuses_is_unavailable(code: int, document: dict[str, Any]) -> None:
    """Without the right to review, under load, broken: nobody is refused for it, and nothing is remembered."""

    async def scenario(server: FixedAnswers) -> None:
        world = World(server.port)
        for turn in (1, 2):
            with pytest.raises(ReviewUnavailable):
                await world.reviewer.review(token())
            assert server.requests == turn
        world.reviewer.close()

    with answering(document, code) as server:
        asyncio.run(scenario(server))


def test_nobody_there() -> None:
    """No server at all."""

    async def scenario() -> None:
        world = World(free_port())
        with pytest.raises(ReviewUnavailable, match="did not answer"):
            await world.reviewer.review(token())
        world.reviewer.close()

    asyncio.run(scenario())


def test_all_who_ask_about_one_token_share_a_review_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the API hangs; one that gives up takes nothing from the others; the number that may wait is bounded."""
    monkeypatch.setattr(token_review, "MAX_PENDING", 3)
    monkeypatch.setattr(token_review, "PEER_PENDING", 2)

    async def begun() -> None:
        for _ in range(3):  # turns of the loop: the caller, its review, the review's thread
            await asyncio.sleep(0)

    async def scenario(proxy: FaultyProxy, server: FixedAnswers) -> None:
        world = World(proxy.port)
        proxy.hang = True
        asking = [asyncio.create_task(world.reviewer.review(token())) for _ in range(5)]
        await begun()
        monkeypatch.setattr(token_review, "REVIEW_S", 0.2)
        late = asyncio.create_task(world.reviewer.review(token(sub="another")))
        await begun()
        with pytest.raises(TooManyReviews):
            await world.reviewer.review(token(sub="a third"))
        elsewhere = asyncio.create_task(world.reviewer.review(token(sub="a third"), "10.0.0.2"))
        await begun()
        with pytest.raises(TooManyReviews):
            await world.reviewer.review(token(sub="a fourth"), "10.0.0.3")
        elsewhere.cancel()
        with pytest.raises(ReviewUnavailable, match="did not answer"):
            await late
        asking.pop().cancel()
        await asyncio.to_thread(proxy.release)
        for each in await asyncio.wait_for(asyncio.gather(*asking), 60):
            assert each.pod == "train-0"
        assert world.counts["authentic", "api"] == 4
        world.reviewer.close()

    with answering(GOOD) as server, FaultyProxy(server.port) as proxy:
        asyncio.run(scenario(proxy, server))


def test_refused_tokens_take_no_room_from_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_review, "MAX_BAD", 3)
    monkeypatch.setattr(token_review, "MAX_GOOD", 3)

    async def scenario(server: FixedAnswers) -> None:
        world = World(server.port)
        await world.reviewer.review(token(sub="good"))
        server.body = body({"authenticated": False})
        for n in range(10):
            with pytest.raises(NotAuthentic):
                await world.reviewer.review(token(sub=n), f"10.0.0.{n}")
        assert len(world.reviewer._bad) == 3
        await world.reviewer.review(token(sub="good"))
        assert world.counts["authentic", "cache"] == 1
        world.reviewer.close()

    with answering(GOOD) as server:
        asyncio.run(scenario(server))


def test_the_cache_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not used for longest goes."""
    monkeypatch.setattr(token_review, "MAX_GOOD", 3)

    async def scenario(server: FixedAnswers) -> None:
        world = World(server.port)
        for name in ("a", "b", "c", "a", "d"):
            await world.reviewer.review(token(sub=name))
        assert len(world.reviewer._good) == 3
        before = server.requests
        await world.reviewer.review(token(sub="a"))
        assert server.requests == before
        await world.reviewer.review(token(sub="b"))
        assert server.requests == before + 1
        world.reviewer.close()

    with answering(GOOD) as server:
        asyncio.run(scenario(server))
