"""A user of a MinIO who may use one bucket: the keys, and the administrator's operations on them."""

from __future__ import annotations

from tests.support.server.minio_server import MinioServer
from tests.support.server.minio_user import admin_of, keys_of


class Tenant:
    """A user with one bucket."""

    def __init__(self, server: MinioServer, bucket: str) -> None:
        self.bucket, self._server = bucket, server
        arn = f"arn:aws:s3:::{bucket}"
        allowed = {"Effect": "Allow", "Action": ["s3:*"], "Resource": [arn, f"{arn}/*"]}
        self.environment = keys_of(server, {"Version": "2012-10-17", "Statement": [allowed]})
        """Credentials, as `MinioServer.environment` has the administrator's."""

    def revoke_keys(self) -> None:
        admin_of(self._server).user_disable(self.environment["AWS_ACCESS_KEY_ID"])
