"""The run as this sidecar sees it: store, log, attempts, health."""
