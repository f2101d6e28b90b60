"""Connection to the sidecar: launcher, session, locks and signals."""
