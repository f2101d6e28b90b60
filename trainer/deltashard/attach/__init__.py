"""The way to the sidecar: where it is, the session with it, locks, signals."""
