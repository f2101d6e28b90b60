"""Whose a token is, by the API's TokenReview.

A good answer holds for the token's life: a pod that is gone meanwhile is unknown to the ledger. A bad one is not kept.
An API that does not answer is `ReviewUnavailable`, never a refusal.
A review ends with the connection that it is for, so the server's bound of connections is one of reviews, too.
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

REVIEW_S = 10.0  # seconds for a review, waiting for its turn included
CACHE_TTL_S = 3600.0  # a good answer holds at most so long; a pod's token lives as long by default
MAX_CACHED = 65536  # answers that are kept: about 400 bytes each. The oldest goes first
MAX_TOKEN = 8192  # characters of a token; a projected one has about 1,200
OUTCOMES = ("authentic", "refused", "cached", "unavailable")
PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCOUNT = re.compile(r"system:serviceaccount:([^:]+):[^:]+")


class NotAuthentic(UserError):
    """The API does not vouch for the token: expired, another audience, its pod is gone, or not bound to a pod."""


class ReviewUnavailable(EnvironmentFault):
    """The API could not be asked."""


class PodIdentity(NamedTuple):
    """The pod a token belongs to."""

    namespace: str
    pod: str
    pod_uid: str


class Reviewer:
    """Reviews of tokens. Use it on one asyncio loop."""

    def __init__(
        self,
        call: Caller,
        *,
        count: Callable[[str], None] = lambda _outcome: None,
        monotonic: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """`count` is told one of `OUTCOMES` for every answer."""
        self._call = call
        self._count = count
        self._monotonic = monotonic
        self._unix = unix
        self._cache: dict[bytes, tuple[PodIdentity, float]] = {}
        """Hash of a token -> its pod, and until when that holds (monotonic seconds)."""

    async def review(self, token: str) -> PodIdentity:
        """The pod of a token; raises `NotAuthentic`, and `ReviewUnavailable` to be tried again."""
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
        self._cache.pop(key, None)  # so that the newest is the last
        if len(self._cache) >= MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        self._cache[key] = result, self._monotonic() + min(CACHE_TTL_S, left_s)
        return result

    async def _review_uncached(self, token: str, claims: Mapping[str, Any]) -> PodIdentity | str:
        """The API's answer about a token."""
        bound = claims.get("kubernetes.io")
        is_ours = FLEET_AUDIENCE in str(claims.get("aud")) and isinstance(bound, dict) and bound.get("pod")
        if len(token) > MAX_TOKEN or not is_ours:
            return "this is no token for us"  # and costs no review
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
    """Pod that a TokenReview's status vouches for, or why there is none."""
    if status.get("authenticated") is not True:
        why = status.get("error") or "it is expired, or its pod is gone"
        return f"the API does not know the token: {why}"[:500]
    # IMPORTANT: an authenticator that does not know of audiences lets every token pass and names no audience.
    if FLEET_AUDIENCE not in (status.get("audiences") or ()):
        return "the token is not for us"
    user = status.get("user") or {}
    account, extra = _ACCOUNT.fullmatch(str(user.get("username"))), user.get("extra") or {}
    pod, uid = (
        (extra.get(f"authentication.kubernetes.io/pod-{each}") or [""])[0] for each in ("name", "uid")
    )
    if account is None or not pod or not uid:
        return "the token is not bound to a pod"
    return PodIdentity(sys.intern(account[1]), pod, uid)


def _claims(token: str) -> Mapping[str, Any]:
    """Claims of a JWT; empty when it is none. Nothing is verified here."""
    try:
        _, part, _ = token.split(".")
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
