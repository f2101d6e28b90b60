"""The Kubernetes side: injection (pure), admission webhook, operator. No torch, and never the store's data.

The folder `operator/` above this package has no `__init__.py`, so the standard library's `operator` stays itself.
"""

from importlib.metadata import version

VERSION = version("deltashard")
"""The version of this package, as it is written into markers."""
