"""A process that is killed during a copy or a removal: `python -m tests.crash.copy_victim DIRECTORY ACTION`.

The run in DIRECTORY is `log_victim`'s, `job`; its copies are `job` in `store2`, and `one` in the same store.
"""

import sys
from pathlib import Path

from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.whole_run import removal, run_copy

from tests.crash.log_victim import log_of


def target_of(directory: Path, action: str) -> RunLog:
    match action:
        case "cp":
            return RunLog(open_store(f"file://{directory}/store2"), "job")
        case "cp one":
            return RunLog(open_store(f"file://{directory}/store"), "one")
    return log_of(directory)


def act(directory: Path, action: str) -> run_copy.CopyResult | removal.Content:
    target = target_of(directory, action)
    if action == "rm":
        return removal.remove(target)
    if action == "cp":
        return run_copy.copy_run(log_of(directory), target)
    with PackCache(directory / "spool", budget_bytes=64 << 20) as cache:
        return run_copy.start_run(log_of(directory), target, "step:4", cache)


if __name__ == "__main__":
    act(Path(sys.argv[1]), sys.argv[2])
