"""A writer of any version of this repository: `python -m tests.crash.log_versions DIRECTORY TREE FIRST_STEP COUNT`.

Opens an attempt of run `job` on the file store in DIRECTORY, commits COUNT checkpoints from FIRST_STEP on, and prints what
it found. TREE is where `deltashard_checkpoint` must come from. Uses only what every version has.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import deltashard_checkpoint
from deltashard_checkpoint.stores.file import FileStore

if (
    Path(deltashard_checkpoint.__file__).parent / "attempts.py"
).exists():  # the flat package, before it had rooms
    from deltashard_checkpoint.attempts import open_attempt
    from deltashard_checkpoint.commits import PartReport, commit_part
    from deltashard_checkpoint.entries import Part
    from deltashard_checkpoint.keys import index_key, new_token
    from deltashard_checkpoint.logs import RunLog
    from deltashard_checkpoint.tables import Box, TableSchema
else:
    from deltashard_checkpoint.format.object_key import index_key, new_token
    from deltashard_checkpoint.format.schema import Box, TableSchema
    from deltashard_checkpoint.log.commit_log import RunLog
    from deltashard_checkpoint.log.entry import Part
    from deltashard_checkpoint.write.attempt import open_attempt
    from deltashard_checkpoint.write.commit import PartReport, commit_part

TABLE = TableSchema(fqn="t", rows=8, columns=2, dtype="float32")
WHOLE = Box(table="t", row_start=0, row_stop=8, col_start=0, col_stop=2)


def write(directory: Path, first_step: int, count: int) -> dict[str, Any]:
    """One attempt with `count` checkpoints: every third a baseline, the others on the one before."""
    log = RunLog(FileStore(directory), "job")
    opened = open_attempt(log, owner="me", closing_wait_s=0.0)
    covers = None if opened.resume is None else opened.resume.seq
    for cut in range(count):
        token = new_token()
        key = index_key(attempt=opened.attempt, cut=cut, rank=0, token=token, xxh3=f"{cut:032x}")
        log.store.put(log.key(key), b"an index")
        part = Part(
            rank=0, index_key=key, boxes=(WHOLE,), stored_bytes=8, covers=None if cut % 3 == 2 else covers
        )
        report = PartReport(
            part=part, tables=(TABLE,), encodings=("fp32",), rows=8, raw_bytes=64, stall_s=0.0
        )
        covers = commit_part(
            log,
            attempt=opened.attempt,
            cut=cut,
            step=first_step + cut,
            world_size=1,
            **({"token": token} if "token" in inspect.signature(commit_part).parameters else {}),
            report=report,
        ).seq
    state = RunLog(FileStore(directory), "job").refresh()
    return {
        "resumed": None if opened.resume is None else opened.resume.step,
        "voided": opened.voided,
        "stopped": None if state.stopped is None else str(state.stopped.error),
        "steps": [entry.step for entry in state.checkpoints.values()],
        "tip": state.tip,
    }


if __name__ == "__main__":
    assert Path(deltashard_checkpoint.__file__).is_relative_to(sys.argv[2]), deltashard_checkpoint.__file__
    print(json.dumps(write(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4]))))
