"""Users of a real MinIO, each with a separate policy."""

from __future__ import annotations

import json
import secrets
import tempfile
from typing import Any

from minio import MinioAdmin
from minio.credentials import StaticProvider

from tests.support.server.minio_server import MinioServer


def admin_of(server: MinioServer) -> MinioAdmin:
    provider = StaticProvider(server.access_key, server.secret_key)
    return MinioAdmin(endpoint=f"{server.host}:{server.port}", credentials=provider, secure=False)


def keys_of(server: MinioServer, policy: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a new user with only the rights of this policy."""
    admin = admin_of(server)
    user, secret = f"tenant-{secrets.token_hex(4)}", secrets.token_hex(16)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(policy))
        file.flush()
        admin.policy_add(user, file.name)
    admin.user_add(user, secret)
    admin.attach_policy([user], user=user)
    return {"AWS_ACCESS_KEY_ID": user, "AWS_SECRET_ACCESS_KEY": secret}
