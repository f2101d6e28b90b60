"""Authentication of pod tokens by the API's TokenReview.

A positive result is cached for the token's life; the ledger does not know deleted pods. Negative results are not
cached. An unavailable API raises `ReviewUnavailable`, not a rejection. A review ends with its connection, so the limit
of connections also bounds the reviews.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deltashard_checkpoint.errors import EnvironmentFault, UserError

from deltashard_operator.kube.call import ApiUnavailable, Caller
from deltashard_operator.kube.cluster_name import FLEET_AUDIENCE

REVIEW_S = 10.0  # timeout in seconds of a review, including its queueing
CACHE_TTL_S = 3600.0  # maximum cache time of a positive result; the default life of a pod's token
MAX_CACHED = 65536  # maximum cached results of about 400 bytes; the oldest is evicted first
MAX_TOKEN = 8192  # characters of a token; a projected one has about 1,200
OUTCOMES = ("authentic", "refused", "cached", "unavailable")
PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCOUNT = re.compile(r"system:serviceaccount:([^:]+):[^:]+")


class NotAuthentic(UserError):
    """The token is not valid: expired, for another audience, of a deleted pod, or not bound to a pod."""


class ReviewUnavailable(EnvironmentFault):
    """The API is unavailable."""


class PodIdentity(NamedTuple):
    """Pod that a token belongs to."""

    namespace: str
    pod: str
    pod_uid: str


class Reviewer:
    """Reviews tokens. Use it on one asyncio loop."""

    def __init__(
        self,
        call: Caller,
        *,
        count: Callable[[str], None] = lambda _outcome: None,
        monotonic: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """`count` is called with one of `OUTCOMES` for each review."""
        self._call = call
        self._count = count
        self._monotonic = monotonic
        self._unix = unix
        self._cache: dict[bytes, tuple[PodIdentity, float]] = {}
        """Hash of a token -> its pod, and the end of its validity (monotonic seconds)."""

    async def review(self, token: str) -> PodIdentity:
        """Return the pod of a token. Raises `NotAuthentic`, or `ReviewUnavailable` to be retried."""
        key = hashlib.sha256(token.encode(errors="replace")).digest()
        known = self._cache.get(key)
        if known is not None and self._monotonic() < known[1]:
            self._count("cached")
            return known[0]
        claims = _claims(token)
        result = await self._review_uncached(token, claims)
        self._count("refused" if isinstance(result, str) else "authentic")
        if isinstance(result, str):
            remedy = f"project a token of the pod with audience {FLEET_AUDIENCE}"
            raise NotAuthentic(result, where="authorization", remedy=remedy)
        expires_s = claims.get("exp")
        left_s = expires_s - self._unix() if isinstance(expires_s, int | float) else CACHE_TTL_S
        self._cache.pop(key, None)  # moves the token to the end
        if len(self._cache) >= MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        self._cache[key] = result, self._monotonic() + min(CACHE_TTL_S, left_s)
        return result

    async def _review_uncached(self, token: str, claims: Mapping[str, Any]) -> PodIdentity | str:
        """Return the API's result for a token: its pod, or why it is rejected."""
        bound = claims.get("kubernetes.io")
        is_ours = FLEET_AUDIENCE in str(claims.get("aud")) and isinstance(bound, dict) and bound.get("pod")
        if len(token) > MAX_TOKEN or not is_ours:
            return "the token is not a pod token for this audience"  # without a review
        spec = {"token": token, "audiences": [FLEET_AUDIENCE]}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        try:
            async with asyncio.timeout(REVIEW_S):
                found = await self._call("POST", PATH, body, tries=1)
            why = "" if found.ok else found.sentence
        except (ApiUnavailable, TimeoutError) as error:
            why = f"no answer: {error}"
        if why:
            self._count("unavailable")
            raise ReviewUnavailable(why[:500], where="TokenReview", remedy="try again")
        return parse_status(found.document.get("status") or {})


def parse_status(status: Mapping[str, Any]) -> PodIdentity | str:
    """Return the pod that a TokenReview's status authenticates, or why it is rejected."""
    if status.get("authenticated") is not True:
        why = status.get("error") or "it is expired, or its pod is deleted"
        return f"the API rejected the token: {why}"[:500]
    # IMPORTANT: an authenticator without audience support accepts every token and returns no audiences.
    if FLEET_AUDIENCE not in (status.get("audiences") or ()):
        return "the token is for another audience"
    user = status.get("user") or {}
    account, extra = _ACCOUNT.fullmatch(str(user.get("username"))), user.get("extra") or {}
    pod, uid = (
        (extra.get(f"authentication.kubernetes.io/pod-{each}") or [""])[0] for each in ("name", "uid")
    )
    if account is None or not pod or not uid:
        return "the token is not bound to a pod"
    return PodIdentity(sys.intern(account[1]), pod, uid)


def _claims(token: str) -> Mapping[str, Any]:
    """Return the unverified claims of a JWT, or an empty mapping if it is invalid."""
    try:
        _, part, _ = token.split(".")
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
