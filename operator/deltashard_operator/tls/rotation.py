"""When certificates change and in which order: from what is stored to the next step. Pure, but for new keys.

A step is one or two writes; who executes it reads again and asks for the next, until there is none. Every state that a
crash between two writes can leave is one from which the steps go on.

**The webhook** (`webhook_step`). Every leaf has an authority of its own, as old as the leaf, whose key is thrown away
once it has signed: nothing is stored that could sign, and every renewal takes the road of a rotation.
1. The Secret gets the next leaf and its authority, beside the ones that serve (`next.crt`, `next.key`, `next-ca.crt`).
2. The configuration's caBundle gets the next authority, beside all that are still valid.
3. When that has been readable for `settle_s` (every API server watches the configuration), the next leaf takes the
   serving one's place in the Secret; at once when nothing that serves is usable.
Pods see a changed Secret a minute or two later, or whenever their kubelet gets to it. That does not matter: the old
authority stays in the bundle as long as the old leaf is valid, a month at a normal renewal.

**The fleet service** (`fleet_step`). Its authority lives ten years, because every pod carries the bundle that it was
injected with for as long as it lives. At two thirds of its life a successor is made and goes into the bundle; it signs
only when the old one's life is nearly over, which leaves pods almost three years to be injected anew. An authority
whose key is gone (or was removed, to rotate now) signs nothing more: its successor takes over at the next leaf, a month
or two later, and until then both kinds of pods are served. A pod whose bundle is older than that loses the controller,
which it reports, and trains on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltashard_operator.tls import issuance
from deltashard_operator.tls.issuance import Issued

CERTIFICATE, KEY, AUTHORITY, AUTHORITY_KEY = "tls.crt", "tls.key", "ca.crt", "ca.key"
NEXT_CERTIFICATE, NEXT_KEY, NEXT_AUTHORITY = "next.crt", "next.key", "next-ca.crt"
OLD_AUTHORITIES = "old.crt"
"""Authorities of the fleet that no longer sign and are still valid."""
_NEXT = (NEXT_CERTIFICATE, NEXT_KEY, NEXT_AUTHORITY)

Data = Mapping[str, bytes]
"""Data of a Secret, decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Names and lifetimes of certificates, and when they change."""

    names: tuple[str, ...]
    leaf_s: float
    settle_s: float = 0.0
    authority_s: float = 0.0
    """Life of the fleet's authority; the webhook's lives as long as its leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to write: None leaves a thing as it is. At most one certificate is new."""

    secret: Data | None = None
    """The Secret with the leaf."""
    authority: Data | None = None
    """The fleet's Secret with its authority."""
    bundle: bytes | None = None
    """Authorities for all who verify."""
    issued: str = ""
    """What was issued: webhook, fleet, fleet_authority."""


def webhook_step(
    secret: Data, bundles: Sequence[bytes], terms: Terms, *, now_s: float, published_s: float | None
) -> Step | None:
    """The next step; None: all is as it should be, or it is not time yet.

    Args:
        secret: the Secret's data.
        bundles: the caBundle of every webhook of the configuration.
        terms: what the leaf shall be.
        now_s: Unix seconds.
        published_s: for how long the authority of the next leaf has been readable in all bundles; None: it is not.
    """
    serving = _usable(secret, CERTIFICATE, KEY, AUTHORITY, now_s)
    coming = _usable(secret, NEXT_CERTIFICATE, NEXT_KEY, NEXT_AUTHORITY, now_s)
    if coming and not _fresh(secret[NEXT_CERTIFICATE], terms, now_s):
        coming = False
    if not coming and not (serving and _fresh(secret[CERTIFICATE], terms, now_s)):
        authority = issuance.authority("deltashard webhook", now_s=now_s, lasts_s=terms.leaf_s)
        leaf = issuance.leaf(authority, terms.names, now_s=now_s, lasts_s=terms.leaf_s)
        new = {
            NEXT_CERTIFICATE: leaf.certificate,
            NEXT_KEY: leaf.key,
            NEXT_AUTHORITY: authority.certificate,
        }
        return Step(secret={**secret, **new}, issued="webhook")
    ours = [secret[key] for key, is_good in ((AUTHORITY, serving), (NEXT_AUTHORITY, coming)) if is_good]
    wanted = issuance.bundle(ours, bundles, now_s=now_s)
    if any(each != wanted for each in bundles):
        return Step(bundle=wanted)
    if coming and (not serving or (published_s is not None and published_s >= terms.settle_s)):
        kept = {key: value for key, value in secret.items() if key not in _NEXT}
        taken = {
            CERTIFICATE: secret[NEXT_CERTIFICATE],
            KEY: secret[NEXT_KEY],
            AUTHORITY: secret[NEXT_AUTHORITY],
        }
        return Step(secret=kept | taken)
    return None


def fleet_step(authority: Data, secret: Data, bundle: bytes, terms: Terms, *, now_s: float) -> Step | None:
    """The next step; None: all is as it should be.

    Args:
        authority: data of the Secret with the authority and its key.
        secret: data of the Secret with the leaf.
        bundle: what pods are injected with.
        terms: what leaf and authority shall be.
        now_s: Unix seconds.
    """
    changed = _authority_step(authority, terms, now_s)
    if changed is not None:
        return changed
    ours = [authority.get(key, b"") for key in (AUTHORITY, NEXT_CERTIFICATE, OLD_AUTHORITIES)]
    wanted = issuance.bundle(ours, [bundle], now_s=now_s)
    if bundle != wanted:
        return Step(bundle=wanted)
    certificate, key = secret.get(CERTIFICATE, b""), secret.get(KEY, b"")
    good = issuance.usable(certificate, key, now_s=now_s) and issuance.signed_by(certificate, bundle)
    if good and _fresh(certificate, terms, now_s):
        return None
    signer = Issued(certificate=authority[AUTHORITY], key=authority[AUTHORITY_KEY])
    leaf = issuance.leaf(signer, terms.names, now_s=now_s, lasts_s=terms.leaf_s)
    return Step(secret={**secret, CERTIFICATE: leaf.certificate, KEY: leaf.key}, issued="fleet")


def _authority_step(stored: Data, terms: Terms, now_s: float) -> Step | None:
    current, key = stored.get(AUTHORITY, b""), stored.get(AUTHORITY_KEY, b"")
    coming, coming_key = stored.get(NEXT_CERTIFICATE, b""), stored.get(NEXT_KEY, b"")
    signs = issuance.usable(current, key, now_s=now_s)
    could_sign = issuance.usable(coming, coming_key, now_s=now_s)
    ends_soon = signs and issuance.not_after_s(current) - now_s < 2 * terms.leaf_s
    if could_sign and (not signs or ends_soon):
        return Step(authority=_succeeded(stored, coming, coming_key, now_s))
    if not signs:
        new = issuance.authority("deltashard fleet", now_s=now_s, lasts_s=terms.authority_s)
        return Step(authority=_succeeded(stored, new.certificate, new.key, now_s), issued="fleet_authority")
    if not could_sign and issuance.aging(current, now_s=now_s):
        new = issuance.authority("deltashard fleet", now_s=now_s, lasts_s=terms.authority_s)
        return Step(
            authority={**stored, NEXT_CERTIFICATE: new.certificate, NEXT_KEY: new.key},
            issued="fleet_authority",
        )
    return None


def _succeeded(stored: Data, certificate: bytes, key: bytes, now_s: float) -> Data:
    old = issuance.bundle([stored.get(AUTHORITY, b""), stored.get(OLD_AUTHORITIES, b"")], [], now_s=now_s)
    kept = {each: value for each, value in stored.items() if each not in _NEXT}
    return {**kept, AUTHORITY: certificate, AUTHORITY_KEY: key, OLD_AUTHORITIES: old}


def _usable(secret: Data, certificate: str, key: str, authority: str, now_s: float) -> bool:
    pem = secret.get(certificate, b"")
    return issuance.usable(pem, secret.get(key, b""), now_s=now_s) and issuance.signed_by(
        pem, secret.get(authority, b"")
    )


def _fresh(certificate: bytes, terms: Terms, now_s: float) -> bool:
    return issuance.is_for(certificate, terms.names) and not issuance.aging(certificate, now_s=now_s)
