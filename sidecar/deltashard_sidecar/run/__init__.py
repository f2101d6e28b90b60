"""The run in this sidecar: store, log, attempts, health."""
