"""The pack cache across processes: full disks and other owners."""

import subprocess
import sys
from pathlib import Path


def test_full_disk_evicts_then_raises(tmp_path: Path) -> None:
    """The process has a file size limit of 64 KiB and writes a pack of 128 KiB."""
    code = f"""
import resource, signal
from pathlib import Path
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.cache.pack_spool import CacheFull
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
cache = PackCache(Path({str(tmp_path)!r}), budget_bytes=1 << 20)
for name in ("old", "older"):
    spool = cache.create(name, capacity_bytes=640)
    spool.reserve(640); spool.write(0, memoryview(bytes(640))); cache.seal(spool); cache.unpin(name)
spool = cache.create("new", capacity_bytes=131072)
spool.reserve(131072)
try:
    spool.write(0, memoryview(bytes(131072)))
except CacheFull as error:
    print(error, "old" in cache, "older" in cache)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "no room on the cache disk" in out
    assert "more space" in out
    assert out.strip().endswith("False False"), "unpinned packs are evicted before the error"
