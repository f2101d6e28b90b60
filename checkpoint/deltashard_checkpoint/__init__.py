"""deltashard's core: codecs, on-store format, commit log, restore plans and stores.

It does not import torch, gRPC or Kubernetes. Rows are written by `format.frame_encoder` -> `write.part_writer` ->
`write.commit` and read by `restore.plan` -> `restore.fetcher` -> `restore.frame_applier`. `docs/format.md` specifies
the objects in the store; `log.commit_log` and `log.replay` keep them consistent.
"""
