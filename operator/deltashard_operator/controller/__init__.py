"""Controller: processes watch events and sidecar reports, writes CheckpointRuns and events, and sends directives."""
