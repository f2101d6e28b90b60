"""What a sidecar reads of its environment: one started in another is replaced. Only a salted hash is written down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

_READ_PREFIXES = ("AWS_", "MINIO_", "GOOGLE_", "AZURE_", "DELTASHARD_")
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
_READ_NAMES = ("SSL_CERT_FILE", "HOME", *_PROXIES, *(name.lower() for name in _PROXIES))
_NOT_READ = (
    "DELTASHARD_SOCKET",
    "DELTASHARD_CONTENT_HASH",
    "DELTASHARD_CRASH_AT",
    "DELTASHARD_URL",
    "DELTASHARD_RUN",
    "DELTASHARD_HOLD_S",
)
"""Ours, or said by the arguments, or a test's."""


def environment_hash(environment: Mapping[str, str], salt: str) -> str:
    """A hash of what a sidecar reads of its environment, to tell whether it changed; the values cannot be told."""
    read = {
        name: value
        for name, value in environment.items()
        if (name.startswith(_READ_PREFIXES) or name in _READ_NAMES) and name not in _NOT_READ
    }
    return hashlib.sha256(f"{salt}\0{json.dumps(read, sort_keys=True)}".encode()).hexdigest()
