"""Read a checkpoint: plan, fetch, and apply frames to arrays."""
