"""`deltashard plan`: cost and benefit of a run's checkpoints, before or during the run."""
