"""How a workload is to be saved: annotations over CheckpointPolicy over the chart's defaults."""
