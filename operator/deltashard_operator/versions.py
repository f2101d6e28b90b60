"""The version of this package, as it is written into markers."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("deltashard")
