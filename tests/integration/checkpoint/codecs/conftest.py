"""The native kernels, for what a fresh process does with them."""

from tests.support.checkpoint.kernel import native

__all__ = ["native"]
