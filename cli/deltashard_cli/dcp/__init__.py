"""Export to and import from directories of torch.distributed.checkpoint (DCP)."""
