"""`kubectl deltashard`: runs on a cluster, as its user sees them, by the CheckpointRuns that the controller keeps."""
