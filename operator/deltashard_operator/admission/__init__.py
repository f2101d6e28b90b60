"""Admission webhook: injects the sidecar into annotated workloads, or rejects them."""
