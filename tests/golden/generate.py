"""Write the golden files of the on-store format: `python -m tests.golden.generate` from the repository's root.

Only ever run for a *new* version of the format: files of a version that was released are never changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deltashard_checkpoint import frames, trees
from deltashard_checkpoint.indexes import encode_index

from tests.unit.format.golden_cases import golden_index, golden_tree
from tests.unit.format.samples import sample_frames

HERE = Path(__file__).parent / f"v{frames.VERSION}"


def main() -> None:
    """Refuse to overwrite; write frames, an index and a tree."""
    if HERE.exists() and "--force" not in sys.argv:
        sys.exit(
            f"{HERE} exists: a released version of the format never changes (--force before its release)"
        )
    HERE.mkdir(exist_ok=True)
    for name, frame in sample_frames().items():
        (HERE / f"{name}.frame").write_bytes(frame.data)
    (HERE / "part.index").write_bytes(encode_index(golden_index()))
    (HERE / "state.tree").write_bytes(trees.encode(golden_tree()).to_bytes())


if __name__ == "__main__":
    main()
