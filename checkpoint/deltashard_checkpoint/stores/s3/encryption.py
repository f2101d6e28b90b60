"""Encryption at rest: headers requested for every object, and verification of the store's response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deltashard_checkpoint.stores.abc import RequestRefused

HEADER = "x-amz-server-side-encryption"
KEY_HEADER = f"{HEADER}-aws-kms-key-id"
KINDS = ("AES256", "aws:kms")
"""The store's keys (SSE-S3), or a key of its key service (SSE-KMS)."""
_KEY_ID = re.compile(r"[A-Za-z0-9:/_.-]{1,512}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encryption:
    """Encryption setting of a store's objects."""

    kind: str
    key_id: str = ""
    """Key of the key service; empty: the bucket's default key."""

    def headers(self) -> dict[str, str]:
        found = {HEADER: self.kind}
        return found | {KEY_HEADER: self.key_id} if self.key_id else found

    def check(self, answer: Mapping[str, str], *, where: str) -> None:
        """Raise `RequestRefused` if the response does not confirm the requested encryption."""
        kind, key = answer.get(HEADER), answer.get(KEY_HEADER, "")
        # The response has the key's ARN, which may end in `key_id`; only the store can resolve an alias.
        same = not self.key_id or "alias/" in self.key_id or _last(key) == _last(self.key_id)
        if kind != self.kind or not same:
            how = f"{kind} {key}".rstrip() if kind else "no encryption header"
            raise RequestRefused(
                f"the store did not confirm encryption by {self.kind} {self.key_id}".rstrip()
                + f": it returned {how}",
                where=where,
                remedy="use a store that has server-side encryption and this key, or leave sse out",
            )


def _last(key_id: str) -> str:
    return re.split("[/:]", key_id)[-1]


def encryption(kind: str | None, key_id: str | None, *, where: str) -> Encryption | None:
    """Return the encryption that a URL requests, or None. Raises `RequestRefused`."""
    if kind is None and key_id is None:
        return None
    if kind not in KINDS or (key_id is not None and (kind != "aws:kms" or _KEY_ID.fullmatch(key_id) is None)):
        what = "kms-key-id without sse=aws:kms" if kind in {None, "AES256"} else f"unsupported sse={kind}"
        raise RequestRefused(
            f"kms-key-id {key_id!r} is not a key name" if kind == "aws:kms" else what,
            where=where,
            remedy="use sse=AES256 (the store's own keys), sse=aws:kms, or sse=aws:kms&kms-key-id=NAME",
        )
    return Encryption(kind=kind, key_id=key_id or "")
