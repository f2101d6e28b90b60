"""Write the golden files of the on-store format: `python -m tests.golden.generate` from the repository's root.

What is there stays: files of a version that was released are never changed (--force before its release).
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from deltashard_checkpoint.format import frame_layout, typed_tree
from deltashard_checkpoint.format.index import encode_index

from tests.golden.golden_case import golden_index, golden_tree
from tests.golden.golden_run import RUN, Held, make_run
from tests.golden.golden_run_2 import RUN_2, make_run_2
from tests.golden.golden_run_3 import RUN_3, make_run_3
from tests.golden.golden_run_4 import RUN_4, make_run_4
from tests.support.checkpoint.sample import sample_frames

HERE = Path(__file__).parent / f"v{frame_layout.VERSION}"


def main() -> None:
    """Write what is missing of frames, index and tree, and of the runs; refuse to overwrite."""
    force = "--force" in sys.argv
    HERE.mkdir(exist_ok=True)
    missing = [write for write, sign in WRITERS if not (HERE / sign).exists()]
    if not missing and not force:
        sys.exit(
            f"{HERE} is whole: a released version of the format never changes (--force before its release)"
        )
    for write in [write for write, _ in WRITERS] if force else missing:
        write()


def write_pieces() -> None:
    """Frames, an index and a tree, each by itself."""
    for name, frame in sample_frames().items():
        (HERE / f"{name}.frame").write_bytes(frame.data)
        if frame.tail is not None:
            (HERE / f"{name}.tail").write_bytes(frame.tail)
    (HERE / "part.index").write_bytes(encode_index(golden_index()))
    (HERE / "state.tree").write_bytes(typed_tree.encode(golden_tree()).to_bytes())


def write_run(name: str, make: Callable[[Path], tuple[dict[str, bytes], dict[int, Held]]]) -> None:
    """A run, as it lies in a store, and beside it in `{name}-expected` what its checkpoints restore."""
    for old in (HERE / name, HERE / f"{name}-expected"):
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        objects, living = make(Path(directory))
    for key, data in objects.items():
        path = HERE / name / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    expected = HERE / f"{name}-expected"
    for seq, held in living.items():
        (expected / str(seq)).mkdir(parents=True, exist_ok=True)
        for array, values in held.arrays():
            np.save(expected / str(seq) / f"{array}.npy", values)
    blobs = {
        seq: {blob: hashlib.sha256(data).hexdigest() for blob, data in sorted(held.blobs.items())}
        for seq, held in living.items()
    }
    (expected / "blobs.json").write_text(json.dumps(blobs, indent=1) + "\n")


WRITERS = (
    (write_pieces, "state.tree"),
    (partial(write_run, RUN, make_run), RUN),
    (partial(write_run, RUN_2, make_run_2), RUN_2),
    (partial(write_run, RUN_3, make_run_3), RUN_3),
    (partial(write_run, RUN_4, make_run_4), RUN_4),
)
"""What writes golden files, and one of them by which it is seen to have done so."""


if __name__ == "__main__":
    main()
