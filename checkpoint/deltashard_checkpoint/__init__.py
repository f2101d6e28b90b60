"""The heart of deltashard: codecs, on-store format, commit log, restore plans and stores.

Pure of torch, gRPC and Kubernetes. The road of a row is `framings` -> `parts` -> `commits`, and back by `plans` ->
`fetches` -> `readers`; `docs/format.md` is what lies on the store, `logs` and `folds` are what makes it consistent.
"""
