"""Write the golden files of the on-store format: `python -m tests.golden.generate` from the repository's root.

What is there stays: files of a version that was released are never changed (--force before its release).
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from deltashard_checkpoint.format import frame as frames
from deltashard_checkpoint.format import typed_tree
from deltashard_checkpoint.format.index import encode_index

from tests.golden.golden_case import golden_index, golden_tree
from tests.golden.golden_run import RUN, make_run
from tests.support.checkpoint.sample import sample_frames

HERE = Path(__file__).parent / f"v{frames.VERSION}"


def main() -> None:
    """Write what is missing of frames, index and tree, and of the run; refuse to overwrite."""
    force = "--force" in sys.argv
    HERE.mkdir(exist_ok=True)
    missing = [
        write
        for write, sign in ((write_pieces, "state.tree"), (write_run, RUN))
        if not (HERE / sign).exists()
    ]
    if not missing and not force:
        sys.exit(
            f"{HERE} is whole: a released version of the format never changes (--force before its release)"
        )
    for write in (write_pieces, write_run) if force else missing:
        write()


def write_pieces() -> None:
    """Frames, an index and a tree, each by itself."""
    for name, frame in sample_frames().items():
        (HERE / f"{name}.frame").write_bytes(frame.data)
    (HERE / "part.index").write_bytes(encode_index(golden_index()))
    (HERE / "state.tree").write_bytes(typed_tree.encode(golden_tree()).to_bytes())


def write_run() -> None:
    """`run`, as it lies in a store, and beside it in `run-expected` what its checkpoints restore."""
    with tempfile.TemporaryDirectory() as directory:
        objects, living = make_run(Path(directory))
    for key, data in objects.items():
        path = HERE / RUN / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    expected = HERE / f"{RUN}-expected"
    for seq, held in living.items():
        (expected / str(seq)).mkdir(parents=True, exist_ok=True)
        for name, values in held.arrays():
            np.save(expected / str(seq) / f"{name}.npy", values)
    blobs = {
        seq: {name: hashlib.sha256(data).hexdigest() for name, data in sorted(held.blobs.items())}
        for seq, held in living.items()
    }
    (expected / "blobs.json").write_text(json.dumps(blobs, indent=1) + "\n")


if __name__ == "__main__":
    main()
