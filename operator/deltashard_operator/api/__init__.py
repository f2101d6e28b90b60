"""Settings of a workload: annotations over CheckpointPolicy over the chart's defaults."""
