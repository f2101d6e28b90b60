"""Kubernetes integration: injection, admission webhook and controller. No torch, no access to store data.

The folder `operator/` has no `__init__.py`, so that it does not shadow the standard library's `operator` module.
"""

from importlib.metadata import version

VERSION = version("deltashard")
"""Version of this package, as written into markers."""
