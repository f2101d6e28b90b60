"""Modules that shard their tables themselves (TorchRec): what of them is here, and what updates it."""
