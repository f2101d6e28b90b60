"""The Kubernetes side: injection (pure), admission webhook, operator. No torch, and never the store's data.

The folder `operator/` above this package has no `__init__.py`, so the standard library's `operator` stays itself.
"""
