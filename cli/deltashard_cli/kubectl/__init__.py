"""`kubectl deltashard`: inspect the runs of a cluster through the CheckpointRuns that the controller maintains."""
