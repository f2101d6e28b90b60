"""The heart of deltashard: codecs, on-store format, commit log, restore plans and stores.

Pure of torch, gRPC and Kubernetes. The road of a row is `format.frame_encoder` -> `write.part_writer` ->
`write.commit`, and back by `restore.plan` -> `restore.fetcher` -> `restore.frame_applier`; `docs/format.md` is what
lies on the store, `log.commit_log` and `log.replay` are what makes it consistent.
"""
