"""The campaign of deaths takes its time, and one of its waits was seen to stand still: it is for those who ask for it."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("DELTASHARD_TEST_LIVES") else ["test_lives.py"]
"""`DELTASHARD_TEST_LIVES=some` runs some of it, `full` every crash point."""
