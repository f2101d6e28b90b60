"""A store in a bucket of MinIO or S3: requests, connections, credentials, and error translation."""

from importlib.util import find_spec

from deltashard_checkpoint.errors import UserError

if _missing := [name for name in ("certifi", "minio", "urllib3") if find_spec(name) is None]:
    raise UserError(f"s3:// needs the packages {', '.join(_missing)}", remedy="pip install 'deltashard[s3]'")
