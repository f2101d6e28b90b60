"""Reading a checkpoint: plan, fetch, apply frames into arrays."""
