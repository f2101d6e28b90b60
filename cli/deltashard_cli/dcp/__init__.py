"""Checkpoints of torch.distributed.checkpoint (DCP): directories that `dcp.load` reads, and that `dcp.save` wrote."""
