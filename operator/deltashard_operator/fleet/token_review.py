"""Whose a token is, by the API's TokenReview, with a cache.

A good answer holds for the token's life: a pod that is gone meanwhile is unknown to the ledger. A bad one holds for
seconds and is kept apart, so that a flood of nonsense takes no room from the good ones. An API that does not answer is
`ReviewUnavailable`: never a refusal, and never cached. All who ask about one token at one time share one review.

At most `THREADS` reviews run at a time and `MAX_PENDING` wait for that, of one peer `PEER_PENDING`: more are
`TooManyReviews` and come again. A text that is no token of a pod for us costs no review.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.errors import EnvironmentFault, UserError

from deltashard_operator.kube.call import ApiClient, ApiUnavailable, Caller
from deltashard_operator.kube.cluster_name import FLEET_AUDIENCE

THREADS = 8
REVIEW_S = 10.0
"""Seconds for a review, waiting for its turn included."""
GOOD_S = 3600.0
"""A good answer holds at most so long; a pod's token lives as long by default."""
BAD_S = 10.0
MAX_GOOD = 65536
"""Good answers in the cache: about 400 bytes each."""
MAX_BAD = 1024
MAX_PENDING = 64
"""Different tokens under review or waiting for it."""
PEER_PENDING = 8
"""Of one address, which may be a node's."""
MAX_TOKEN = 8192
"""Characters of a token; a projected one has about 1,200."""
OUTCOMES = ("authentic", "refused", "unavailable", "too_many")
SOURCES = ("api", "cache", "none")
"""Where the answer came from; none: the token was not worth a review, or there was no room for one."""
_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
_EXTRA = "authentication.kubernetes.io/"


class NotAuthentic(UserError):
    """The API does not vouch for the token: expired, another audience, its pod is gone, or not bound to a pod."""


class ReviewUnavailable(EnvironmentFault):
    """The API could not be asked."""


class TooManyReviews(EnvironmentFault):
    """There is no room for another review at the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """The pod a token belongs to."""

    namespace: str
    pod: str
    pod_uid: str


_Said = PodIdentity | NotAuthentic
_Cache = OrderedDict[bytes, tuple[_Said, float]]
"""Hash of a token -> answer, and until when it holds (monotonic seconds)."""


class Reviewer:
    """Reviews of tokens, with their cache. Use it on one asyncio loop, and `close` it."""

    def __init__(
        self,
        api: ApiClient,
        *,
        audience: str = FLEET_AUDIENCE,
        count: Callable[[str, str], None] = lambda _outcome, _source: None,
        monotonic: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """`count` is told the outcome and the source of every answer, of `OUTCOMES` and `SOURCES`."""
        self._call = Caller(api, threads=THREADS)
        self._audience = audience
        self._count = count
        self._monotonic = monotonic
        self._unix = unix
        self._good: _Cache = OrderedDict()
        self._bad: _Cache = OrderedDict()
        self._peers: Counter[str] = Counter()
        self._pending: dict[bytes, asyncio.Task[_Said]] = {}

    def close(self) -> None:
        """Let go of the threads; a review under way ends by its own timeout."""
        self._call.close()

    async def review(self, token: str, peer: str = "") -> PodIdentity:
        """The pod of a token that came from this address.

        Raises:
            NotAuthentic: it is nobody's.
            ReviewUnavailable: the API could not be asked; try again.
            TooManyReviews: try again.
        """
        if not is_ours(token, self._audience):
            self._count("refused", "none")
            remedy = f"project one with audience {self._audience}"
            raise NotAuthentic("this is no token of a pod for us", where="authorization", remedy=remedy)
        key = hashlib.sha256(token.encode()).digest()
        for cache in (self._good, self._bad):
            said, until_s = cache.get(key, (None, 0.0))
            if said is not None and self._monotonic() < until_s:
                cache.move_to_end(key)
                return self._told(said, "cache")
        if key not in self._pending:
            self._begin(key, token, peer)
        try:
            said = await asyncio.shield(self._pending[key])  # others may wait for it, too
        except ReviewUnavailable:
            self._count("unavailable", "api")
            raise
        return self._told(said, "api")

    def _begin(self, key: bytes, token: str, peer: str) -> None:
        if len(self._pending) >= MAX_PENDING or self._peers[peer] >= PEER_PENDING:
            self._count("too_many", "none")
            raise TooManyReviews("too many token reviews are waiting", remedy="try again")
        self._peers[peer] += 1
        task = self._pending[key] = asyncio.create_task(self._ask(key, token))

        def over(task: asyncio.Task[_Said]) -> None:
            task.cancelled() or task.exception()  # nobody may wait for it any more
            self._pending.pop(key)
            self._peers[peer] -= 1
            self._peers += Counter()  # without those at 0

        task.add_done_callback(over)

    def _told(self, said: _Said, source: str) -> PodIdentity:
        self._count("refused" if isinstance(said, NotAuthentic) else "authentic", source)
        if isinstance(said, NotAuthentic):
            raise NotAuthentic(said.what, where=said.where, remedy=said.remedy)
        return said

    async def _ask(self, key: bytes, token: str) -> _Said:
        spec = {"token": token, "audiences": [self._audience]}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        try:
            async with asyncio.timeout(REVIEW_S):
                answer = await self._call("POST", _PATH, body, tries=1)
        except (ApiUnavailable, TimeoutError) as error:
            raise ReviewUnavailable(f"the API did not answer: {error}"[:500], where="TokenReview") from None
        if not answer.ok:
            raise ReviewUnavailable(f"the API answered {answer.sentence}", where="TokenReview")
        said = identity_of(answer.document.get("status"), self._audience)
        cache, most, keep_s = self._bad, MAX_BAD, BAD_S
        if isinstance(said, PodIdentity):
            cache, most = self._good, MAX_GOOD
            keep_s = min(GOOD_S, expires_at_s(token, self._unix() + GOOD_S) - self._unix())
        cache[key] = said, self._monotonic() + keep_s
        while len(cache) > most:
            cache.popitem(last=False)
        return said


def identity_of(status: object, audience: str) -> _Said:
    """Pod that a TokenReview's status vouches for, or why there is none."""
    found = _mapping(status)
    if found.get("authenticated") is not True:
        why = found.get("error") or "it is expired, or its pod is gone"
        return NotAuthentic(f"the API does not know the token: {why}"[:500], remedy="come with a new one")
    # IMPORTANT: an authenticator that does not know of audiences lets every token pass and names no audience.
    if audience not in (found.get("audiences") or ()):
        return NotAuthentic("the token is not for us", remedy=f"project one with audience {audience}")
    user = _mapping(found.get("user"))
    extra = _mapping(user.get("extra"))
    pod, pod_uid = ((extra.get(f"{_EXTRA}{each}") or [""])[0] for each in ("pod-name", "pod-uid"))
    account = str(user.get("username")).split(":")
    if len(account) != 4 or account[:2] != ["system", "serviceaccount"] or not all((*account, pod, pod_uid)):
        return NotAuthentic("the token is not bound to a pod", remedy="project it in the pod's volume")
    return PodIdentity(namespace=sys.intern(account[2]), pod=pod, pod_uid=pod_uid)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _claims(token: str) -> Mapping[str, Any]:
    """Claims of a JWT; empty when it is none. Nothing is verified here."""
    parts = token.split(".")
    if len(parts) != 3 or not all(parts):
        return {}
    try:
        return _mapping(json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))))
    except (ValueError, RecursionError):
        return {}


def is_ours(token: str, audience: str) -> bool:
    """Whether a token has the form of a pod's for this audience, whoever made it."""
    if not token or len(token) > MAX_TOKEN or not token.isascii():
        return False
    claims = _claims(token)
    said = claims.get("aud")
    return audience in (said if isinstance(said, list) else [said]) and isinstance(
        _mapping(claims.get("kubernetes.io")).get("pod"), dict
    )


def expires_at_s(token: str, otherwise_s: float) -> float:
    """Unix time at which a JWT says it expires, or `otherwise_s`. Nothing is verified here."""
    expiry_s = _claims(token).get("exp")
    if isinstance(expiry_s, bool) or not isinstance(expiry_s, int | float):
        return otherwise_s
    return float(expiry_s)
