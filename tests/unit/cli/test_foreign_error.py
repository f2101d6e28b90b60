"""Errors of other libraries are reported with message, place and remedy."""

from __future__ import annotations

import errno
import os

import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_cli.main import ENVIRONMENT, INTERNAL, LocalFault, exit_code, wrap_os_error


@pytest.mark.parametrize(
    ("error", "what", "where"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/out/t.npy"),
            "No space left on device",
            "/out/t.npy",
        ),
        (OSError("no errno"), "OSError: no errno", "this machine"),
        (MemoryError(), "out of memory", "this process"),
    ],
)
def test_os_and_memory_errors_are_environment_errors(error: Exception, what: str, where: str) -> None:
    found = wrap_os_error(error)
    assert isinstance(found, LocalFault)
    assert (found.what, found.where, exit_code(found)) == (what, where, ENVIRONMENT)
    assert found.remedy


def test_other_errors_are_unchanged() -> None:
    """Errors of deltashard already have a remedy, and programming errors must stay visible."""
    known, bug = UserError("x"), KeyError("y")
    assert wrap_os_error(known) is known
    assert exit_code(wrap_os_error(bug)) == INTERNAL
