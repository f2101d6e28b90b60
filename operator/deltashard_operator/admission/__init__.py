"""The webhook: an annotated workload in, the same with its sidecar out, or a refusal."""
