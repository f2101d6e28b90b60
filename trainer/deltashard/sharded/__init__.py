"""Modules that shard their tables themselves (TorchRec): their local shards, and the optimizers that update them."""
