"""The file store when its process is killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deltashard_checkpoint.stores.abc import ObjectNotFound
from deltashard_checkpoint.stores.file import FileStore


@pytest.mark.parametrize("instant", ["write", "fsync", "link"])
def test_kill_during_put_leaves_no_object(tmp_path: Path, instant: str) -> None:
    """No object appears in listings, and the next writer can use the key."""
    program = f"""
import os, signal, sys
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.key_rule import BadKey
store = FileStore(sys.argv[1])
real = os.{instant}
def kill_self(*arguments):
    if "{instant}" == "write":
        real(arguments[0], bytes(arguments[1])[:3])
    os.kill(os.getpid(), signal.SIGKILL)
os.{instant} = kill_self
store.put_if_absent("log/0", b"first " * 100)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    store = FileStore(tmp_path / "store")
    # `fsync` of the new directory kills the process before there is a temporary file.
    assert len(list((tmp_path / "store" / "log").iterdir())) == (0 if instant == "fsync" else 1)
    assert list(store.list("")) == []
    with pytest.raises(ObjectNotFound):
        store.get("log/0")
    store.put_if_absent("log/0", b"second")
    assert store.get("log/0") == b"second"
