"""Users of a MinIO who may use one bucket each: their keys, and what their administrator does to them."""

from __future__ import annotations

import json
import secrets
import tempfile

from minio import MinioAdmin
from minio.credentials import StaticProvider

from tests.support.server.minio_server import MinioServer


def admin_of(server: MinioServer) -> MinioAdmin:
    """The server's administration."""
    provider = StaticProvider(server.access_key, server.secret_key)
    return MinioAdmin(endpoint=f"{server.host}:{server.port}", credentials=provider, secure=False)


class Tenant:
    """A user with one bucket."""

    def __init__(self, server: MinioServer, bucket: str) -> None:
        self.bucket = bucket
        self.access_key, self.secret_key = f"tenant-{secrets.token_hex(4)}", secrets.token_hex(16)
        self._admin = admin_of(server)
        arn = "arn:aws:s3:::"
        policy = {
            "Version": "2012-10-17",
            "Statement": [
                {
                    "Effect": "Allow",
                    "Action": ["s3:*"],
                    "Resource": [f"{arn}{bucket}", f"{arn}{bucket}/*"],
                }
            ],
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps(policy))
            file.flush()
            self._admin.policy_add(self.access_key, file.name)
        self._admin.user_add(self.access_key, self.secret_key)
        self._admin.attach_policy([self.access_key], user=self.access_key)

    @property
    def environment(self) -> dict[str, str]:
        """Its credentials, as `MinioServer.environment` has the administrator's."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def dismiss(self) -> None:
        """Its keys are good for nothing any more."""
        self._admin.user_disable(self.access_key)
