"""When certificates change and in which order: from what is stored to the next step. Pure, but for new keys.

One Secret holds the authority with its key and one leaf for both Services. The authority's certificate is in a bundle
that all clients verify by: the webhook's caBundle and a ConfigMap, from which it is written into every pod that is
injected. A step is one write, or one bundle in several places; a crash between two leaves a state from which the steps
go on.

**The leaf** is renewed at two thirds of its life, by the same authority. Pods see a changed Secret a minute or two
later; that does not matter, since every bundle verifies both leaves.

**The authority** lives ten years, because a pod carries the bundle that it was injected with for as long as it lives.
At two thirds of its life a successor is made and goes into the bundle; it signs only when the old one's life is nearly
over, which leaves pods almost three years to be injected anew. An authority whose key is gone (or was removed, to
rotate now) signs nothing more: its successor takes over at the next leaf, a month or two later, and until then both
kinds of pods are served. A pod whose bundle is older than that loses the controller, which it reports, and trains on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltashard_operator.tls import issuance
from deltashard_operator.tls.issuance import Issued

CERTIFICATE, KEY, AUTHORITY, AUTHORITY_KEY = "tls.crt", "tls.key", "ca.crt", "ca.key"
NEXT_AUTHORITY, NEXT_AUTHORITY_KEY = "next-ca.crt", "next-ca.key"
_COMMON_NAME = "deltashard"

Data = Mapping[str, bytes]
"""Data of the Secret, decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Names and lifetimes of certificates."""

    names: tuple[str, ...]
    leaf_s: float
    authority_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to write: None leaves a thing as it is."""

    secret: Data | None = None
    bundle: bytes | None = None
    """Authorities for all who verify."""
    issued: str = ""
    """What was issued: authority, leaf."""


def next_step(secret: Data, bundles: Sequence[bytes], terms: Terms, *, now_s: float) -> Step | None:
    """The next step; None: all is as it should be. `bundles` are those of all places, as they are now."""
    changed = _authority_step(secret, terms, now_s)
    if changed is not None:
        return changed
    ours = [secret.get(key, b"") for key in (AUTHORITY, NEXT_AUTHORITY)]
    wanted = issuance.bundle(ours, bundles, now_s=now_s)
    if any(each != wanted for each in bundles):
        return Step(bundle=wanted)
    certificate = secret.get(CERTIFICATE, b"")
    if (
        serves(secret, now_s=now_s)
        and issuance.signed_by(certificate, wanted)
        and issuance.is_for(certificate, terms.names)
        and not issuance.aging(certificate, now_s=now_s)
    ):
        return None
    signer = Issued(certificate=secret[AUTHORITY], key=secret[AUTHORITY_KEY])
    leaf = issuance.leaf(signer, terms.names, now_s=now_s, lasts_s=terms.leaf_s)
    return Step(secret={**secret, CERTIFICATE: leaf.certificate, KEY: leaf.key}, issued="leaf")


def serves(secret: Data, *, now_s: float) -> bool:
    """Whether the leaf is one that servers can use."""
    return issuance.usable(secret.get(CERTIFICATE, b""), secret.get(KEY, b""), now_s=now_s)


def _authority_step(secret: Data, terms: Terms, now_s: float) -> Step | None:
    current, coming = secret.get(AUTHORITY, b""), secret.get(NEXT_AUTHORITY, b"")
    coming_key = secret.get(NEXT_AUTHORITY_KEY, b"")
    signs = issuance.usable(current, secret.get(AUTHORITY_KEY, b""), now_s=now_s)
    could_sign = issuance.usable(coming, coming_key, now_s=now_s)
    ends_soon = signs and issuance.not_after_s(current) - now_s < 2 * terms.leaf_s
    if could_sign and (not signs or ends_soon):
        rest = {
            key: value for key, value in secret.items() if key not in {NEXT_AUTHORITY, NEXT_AUTHORITY_KEY}
        }
        return Step(secret={**rest, AUTHORITY: coming, AUTHORITY_KEY: coming_key})
    if signs and (could_sign or not issuance.aging(current, now_s=now_s)):
        return None
    new = issuance.authority(_COMMON_NAME, now_s=now_s, lasts_s=terms.authority_s)
    names = (NEXT_AUTHORITY, NEXT_AUTHORITY_KEY) if signs else (AUTHORITY, AUTHORITY_KEY)
    return Step(
        secret={**secret, **dict(zip(names, (new.certificate, new.key), strict=True))}, issued="authority"
    )
