"""Review of tokens: whose each is, by the API's TokenReview, asked off the loop, with a cache.

A sidecar's token is bound to its pod and to our audience; the API server checks signature, expiry, audience and that
the pod still exists, and says which pod it is. We believe that and nothing a sidecar says of itself.

Nonsense is cheap: what has not the form of a bound token for us, which everybody can read, is refused without a
question, and a peer that came with many that are nobody's has to wait a moment (`Strangers`). Answers are cached by
the token's hash: good ones until the token expires, but for at most five minutes, bad ones for seconds and apart from
the good ones, so that a storm of reconnects (or of nonsense) does not become a storm on the API. A token whose pod was
deleted can thus be good for five minutes more here; the ledger does not know the pod any longer. An API that does not
answer is `ReviewUnavailable`, which is cached not at all and is never a refusal: the sidecar comes again.

Reviews run in a few threads (the client blocks), at most `THREADS` at a time, and nobody waits for one longer than
`REVIEW_S`. Everyone who asks about one token at one time shares one review.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import urllib3
from deltashard_checkpoint.errors import EnvironmentFault, UserError
from kubernetes import client

from deltashard_operator.kube.cluster_name import FLEET_AUDIENCE

THREADS = 8
CONNECT_S = 5.0
READ_S = 10.0
REVIEW_S = 15.0
"""Seconds for a review, waiting for a thread included."""
GOOD_S = 300.0
BAD_S = 10.0
MAX_CACHED = 16384
"""Good answers in the cache."""
MAX_REFUSED = 1024
"""Bad answers in the cache."""
PEER_THREADS = 6
"""Reviews for one peer at a time: it leaves some to the others."""
MAX_PENDING = 8192
"""Different tokens under review or waiting for it."""
WINDOW_S = 10.0
MAX_BAD = 64
"""Tokens of one peer that were refused within the window."""
MAX_PEERS = 4096
MAX_TOKEN = 8192
"""Characters of a token; a projected one has about 1,200."""
OUTCOMES = ("authentic", "refused", "unavailable")
SOURCES = ("api", "cache", "none")
"""Where the answer came from; none: the token was not worth a question, or there was no room for one."""

_EXTRA = "authentication.kubernetes.io/"
_PREFIX = "system:serviceaccount:"


class NotAuthentic(UserError):
    """The API does not vouch for the token: expired, another audience, its pod is gone, or not bound to a pod."""


class ReviewUnavailable(EnvironmentFault):
    """The API could not be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """The pod a token belongs to."""

    namespace: str
    pod: str
    pod_uid: str
    service_account: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    said: PodIdentity | NotAuthentic
    until_s: float
    """Time until which it holds, by the monotonic clock."""


class Strangers:
    """Peers that came with tokens that are nobody's, lately: their next unknown one is not worth a question to the API.

    Counted by the peer's address, in a window, for a bounded number of peers. A peer may be a node that several pods
    share (the host's network, an address translation), so nobody is shut out for longer than the window, and a token
    that is known already is never asked about here.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._bad: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Peer -> (begin of its window, refused since)."""

    def __len__(self) -> int:
        return len(self._bad)

    def refused(self, peer: str) -> None:
        now_s = self._monotonic()
        begun_s, count = self._bad.pop(peer, (now_s, 0))
        self._bad[peer] = (begun_s, count + 1) if now_s - begun_s < WINDOW_S else (now_s, 1)
        while len(self._bad) > MAX_PEERS:
            self._bad.popitem(last=False)

    def waits(self, peer: str) -> bool:
        """Whether this peer has to wait until its window is over."""
        begun_s, count = self._bad.get(peer, (0.0, 0))
        return count >= MAX_BAD and self._monotonic() - begun_s < WINDOW_S


class Reviewer:
    """Reviews of tokens, with their cache. Use it on one asyncio loop, and `close` it."""

    def __init__(
        self,
        api: client.ApiClient,
        *,
        audience: str = FLEET_AUDIENCE,
        count: Callable[[str, str], None] = lambda _outcome, _source: None,
        monotonic: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
        strangers: Strangers | None = None,
    ) -> None:
        """`count` is told the outcome and the source of every answer, of `OUTCOMES` and `SOURCES`."""
        self._reviews = client.AuthenticationV1Api(api)
        self._audience = audience
        self._count = count
        self._monotonic = monotonic
        self._unix = unix
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reviews")
        self._slots = asyncio.Semaphore(THREADS)
        self._strangers = strangers or Strangers(monotonic)
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._refused: OrderedDict[bytes, _Answer] = OrderedDict()
        self._peers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._pending: dict[bytes, asyncio.Task[_Answer | ReviewUnavailable]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def close(self) -> None:
        """Let go of the threads; a review under way ends by its own timeout."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def review(self, token: str, peer: str = "") -> PodIdentity:
        """The pod of a token that came from this peer.

        Raises:
            NotAuthentic: it is nobody's.
            ReviewUnavailable: the API could not be asked; try again.
        """
        if not is_ours(token, self._audience):
            self._count("refused", "none")
            raise NotAuthentic(
                "this is no token of a pod for us",
                where="authorization metadata",
                remedy=f"project one with audience {self._audience}",
            )
        key = hashlib.sha256(token.encode()).digest()
        for cache in (self._answers, self._refused):
            known = cache.get(key)
            if known is not None and self._monotonic() < known.until_s:
                cache.move_to_end(key)
                return self._told(known, "cache")
        task = self._pending.get(key)
        if task is None:
            if self._strangers.waits(peer):
                self._count("unavailable", "none")
                raise ReviewUnavailable(
                    "too many tokens that came from here are nobody's", remedy="try again"
                )
            if len(self._pending) >= MAX_PENDING:
                self._count("unavailable", "none")
                raise ReviewUnavailable("too many token reviews are waiting", remedy="try again")
            task = asyncio.create_task(self._ask(key, token, peer))
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        said = await asyncio.shield(task)  # others may wait for it, too
        if isinstance(said, ReviewUnavailable):
            self._count("unavailable", "api")
            raise ReviewUnavailable(said.what, where=said.where, remedy=said.remedy)
        return self._told(said, "api")

    def _told(self, answer: _Answer, source: str) -> PodIdentity:
        said = answer.said
        if isinstance(said, NotAuthentic):
            self._count("refused", source)
            raise NotAuthentic(said.what, where=said.where, remedy=said.remedy)
        self._count("authentic", source)
        return said

    async def _ask(self, key: bytes, token: str, peer: str) -> _Answer | ReviewUnavailable:
        loop = asyncio.get_running_loop()
        mine = self._peers.setdefault(peer, asyncio.Semaphore(PEER_THREADS))
        try:
            async with asyncio.timeout(REVIEW_S), mine, self._slots:
                said = await loop.run_in_executor(self._pool, self._review, token)
        except client.ApiException as error:
            return ReviewUnavailable(f"the API answered {error.status} {error.reason}", where="TokenReview")
        except (urllib3.exceptions.HTTPError, OSError) as error:  # OSError: TimeoutError, too
            return ReviewUnavailable(f"the API did not answer: {type(error).__name__}", where="TokenReview")
        except ValueError as error:  # the client's models check what they read
            return ReviewUnavailable(f"the API's answer cannot be read: {error}"[:500], where="TokenReview")
        keep_s = BAD_S
        if isinstance(said, PodIdentity):
            expiry_s = expires_at_s(token)
            keep_s = GOOD_S if expiry_s is None else min(GOOD_S, expiry_s - self._unix())
        answer = _Answer(said=said, until_s=self._monotonic() + keep_s)
        cache, most = self._answers, MAX_CACHED
        if isinstance(said, NotAuthentic):
            self._strangers.refused(peer)
            cache, most = self._refused, MAX_REFUSED
        cache[key] = answer
        cache.move_to_end(key)
        while len(cache) > most:
            cache.popitem(last=False)
        return answer

    def _review(self, token: str) -> PodIdentity | NotAuthentic:
        spec = client.V1TokenReviewSpec(token=token, audiences=[self._audience])
        answer = self._reviews.create_token_review(
            client.V1TokenReview(api_version="authentication.k8s.io/v1", kind="TokenReview", spec=spec),
            _request_timeout=(CONNECT_S, READ_S),
        )
        return identity_of(answer.status, self._audience)


def identity_of(status: client.V1TokenReviewStatus | None, audience: str) -> PodIdentity | NotAuthentic:
    """Pod that a TokenReview's status vouches for, or why there is none."""
    if status is None or not status.authenticated or status.user is None:
        why = (status.error if status is not None else None) or "it is expired, or its pod is gone"
        return NotAuthentic(f"the API does not know the token: {why}"[:500], remedy="come with a new one")
    # IMPORTANT: an authenticator that does not know of audiences lets every token pass and names no audience.
    if audience not in (status.audiences or ()):
        return NotAuthentic("the token is not for us", remedy=f"project one with audience {audience}")
    extra = status.user.extra or {}
    pod, pod_uid = (extra.get(f"{_EXTRA}{each}") or [""] for each in ("pod-name", "pod-uid"))
    username = status.user.username or ""
    namespace, _, account = username.removeprefix(_PREFIX).partition(":")
    if not (username.startswith(_PREFIX) and namespace and account and pod[0] and pod_uid[0]):
        return NotAuthentic("the token is not bound to a pod", remedy="project it in the pod's volume")
    return PodIdentity(namespace=namespace, pod=pod[0], pod_uid=pod_uid[0], service_account=account)


def _claims(token: str) -> dict[str, Any]:
    """Claims of a JWT; empty when it is none. Nothing is verified here."""
    parts = token.split(".")
    if len(parts) != 3 or not all(parts):
        return {}
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}


def is_ours(token: str, audience: str) -> bool:
    """Whether a token has the form of a pod's for this audience, whoever made it."""
    if not token or len(token) > MAX_TOKEN or not token.isascii():
        return False
    claims = _claims(token)
    said, bound = claims.get("aud"), claims.get("kubernetes.io")
    pod = bound.get("pod") if isinstance(bound, dict) else None
    return audience in (said if isinstance(said, list) else [said]) and isinstance(pod, dict)


def expires_at_s(token: str) -> float | None:
    """Unix time at which a JWT says it expires; None when it does not say. Nothing is verified here."""
    expiry_s = _claims(token).get("exp")
    if isinstance(expiry_s, bool) or not isinstance(expiry_s, int | float):
        return None
    return float(expiry_s)
