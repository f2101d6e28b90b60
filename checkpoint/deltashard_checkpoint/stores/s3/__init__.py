"""A store in a bucket of MinIO or S3: requests, connections, credentials, what refusals mean."""
