"""Token reviews: accepted tokens, cached results, and a slow or unavailable API."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from typing import Any, Self

import pytest
from deltashard_operator.fleet import token_review
from deltashard_operator.fleet.token_review import (
    NotAuthentic,
    PodIdentity,
    Reviewer,
    ReviewUnavailable,
    parse_status,
)
from deltashard_operator.kube.call import Caller
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operator.access import access_to
from tests.support.server.faulty_proxy import FaultyProxy, FixedResponses

AUDIENCE = "deltashard-fleet"
USER: dict[str, Any] = {
    "username": "system:serviceaccount:team-a:default",
    "extra": {
        "authentication.kubernetes.io/pod-name": ["train-0"],
        "authentication.kubernetes.io/pod-uid": ["u-1"],
    },
}
GOOD: dict[str, Any] = {"authenticated": True, "user": USER, "audiences": [AUDIENCE]}
CLAIMS = {"aud": [AUDIENCE], "kubernetes.io": {"pod": {"name": "train-0"}}}
UNIX_S = 1e9


def token(**claims: Any) -> str:
    """Return a token in the format of a pod's token for the service's audience."""
    parts = (json.dumps(part).encode() for part in ({"alg": "none"}, CLAIMS | claims))
    return ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "s"])


def answering(status: dict[str, Any], code: int = 201) -> FixedResponses:
    body = json.dumps({"kind": "TokenReview", "status": status}).encode()
    return FixedResponses(code, body, {"Content-Type": "application/json"})


class ReviewerHarness:
    """A reviewer for the API at a port, with a manual clock and counters. It is a context manager."""

    def __init__(self, port: int) -> None:
        self.now_s = 1000.0
        self.counts: Counter[str] = Counter()
        self._loop = asyncio.Runner()
        self.reviewer = self._loop.run(self._made(port))

    async def _made(self, port: int) -> Reviewer:
        self._call = Caller(access_to(port))
        return Reviewer(
            self._call,
            count=lambda outcome: self.counts.update([outcome]),
            monotonic=lambda: self.now_s,
            unix=lambda: self.now_s + UNIX_S,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._call.close())
        self._loop.close()

    def review(self, *tokens: str) -> list[PodIdentity | type[Exception]]:
        """Review the tokens in order and return each identity or error type."""

        async def scenario() -> list[PodIdentity | type[Exception]]:
            found: list[PodIdentity | type[Exception]] = []
            for each in tokens:
                try:
                    found.append(await self.reviewer.review(each))
                except (NotAuthentic, ReviewUnavailable) as error:
                    found.append(type(error))
            return found

        return self._loop.run(scenario())


def test_only_bound_token_for_audience_is_accepted() -> None:
    """Each required field is missing in one case."""
    assert parse_status(GOOD) == ("team-a", "train-0", "u-1")
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
        assert isinstance(parse_status(GOOD | changes), str), changes


@given(
    st.text(max_size=60)
    | st.builds(lambda value: token(exp=value, aud=value), st.integers() | st.text() | st.none())
)
def test_any_text_has_claims_or_none(text: str) -> None:
    """Parsing an unverified token never raises."""
    assert isinstance(token_review._claims(text), dict)


@pytest.mark.parametrize(("lifetime_s", "holds_s"), [(60.0, 60.0), (9999.0, token_review.CACHE_TTL_S)])
def test_positive_reviews_are_cached_until_expiry(lifetime_s: float, holds_s: float) -> None:
    with answering(GOOD) as server, ReviewerHarness(server.port) as world:
        sent, begun_s = token(exp=world.now_s + UNIX_S + lifetime_s), world.now_s
        for at_s, asked in ((0.0, 1), (holds_s - 1, 1), (holds_s, 2)):
            world.now_s = begun_s + at_s
            assert world.review(sent) == [("team-a", "train-0", "u-1")]
            assert server.requests == asked
        assert world.counts == {"authentic": 2, "cached": 1}


def test_negative_reviews_are_not_cached_nor_malformed_tokens_sent() -> None:
    with answering({"authenticated": False}) as server, ReviewerHarness(server.port) as world:
        assert world.review(*[token()] * 2) == [NotAuthentic] * 2
        assert server.requests == 2
        nonsense = ["", "ü", "x" * 9999, "garbage", "a.b.c", "..", "a.W10.c", token(aud="another")]
        unbound: list[Any] = [None, [], {}, {"pod": None}]
        nonsense += [token(aud=None), *(token(**{"kubernetes.io": each}) for each in unbound)]
        assert world.review(*nonsense) == [NotAuthentic] * 13
        assert server.requests == 2


@pytest.mark.parametrize("code", [403, 500, 429, 404])
def test_api_error_is_unavailable(code: int) -> None:
    """Missing rights, overload or server errors reject no token and are not cached."""
    with answering({}, code) as server, ReviewerHarness(server.port) as world:
        assert world.review(token(), token()) == [ReviewUnavailable] * 2
        assert server.requests == 2


def test_review_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_review, "REVIEW_S", 0.5)
    with answering(GOOD) as server, FaultyProxy(server.port) as proxy, ReviewerHarness(proxy.port) as world:
        proxy.hang = True
        assert world.review(token(), token()) == [ReviewUnavailable] * 2
        proxy.release()
        monkeypatch.setattr(token_review, "REVIEW_S", 60.0)
        assert world.review(token()) == [("team-a", "train-0", "u-1")]


def test_review_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refreshed answer counts as the newest."""
    monkeypatch.setattr(token_review, "MAX_CACHED", 3)
    with answering(GOOD) as server, ReviewerHarness(server.port) as world:
        for name, asked in (("a", 1), ("b", 2), ("c", 3), ("d", 4), ("d", 4), ("b", 4), ("a", 5)):
            world.review(token(sub=name))
            assert server.requests == asked
        world.now_s += token_review.CACHE_TTL_S
        for name, asked in (("a", 6), ("d", 7), ("c", 8), ("a", 8), ("b", 9), ("d", 9), ("c", 9), ("a", 10)):
            world.review(token(sub=name))
            assert server.requests == asked
