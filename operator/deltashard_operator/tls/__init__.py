"""TLS certificates: issuance, validation, renewal, loading."""
