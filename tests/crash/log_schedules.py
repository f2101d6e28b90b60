"""Bulk runs of the log model: `python -m tests.crash.log_schedules --schedules 100000 --processes 2`.

Prints what happened in them; on a violation its seed, which repeats it: `--first SEED --schedules 1 --trace`.
"""

import argparse
import json
import multiprocessing
import sys
import time
import traceback

from tests.crash.log_model import Counts, run_schedule, total

_CHUNK = 200


def run_chunk(seeds: range) -> tuple[Counts, list[tuple[int, str]]]:
    """Schedules of these seeds: (what happened, violations)."""
    counts, failures = Counts(), []
    for seed in seeds:
        try:
            counts = total((counts, run_schedule(seed)))
        except Exception:
            failures.append((seed, traceback.format_exc()))
    return counts, failures


def main() -> int:
    """Run the schedules; exit status 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    last = options.first + options.schedules
    chunks = [range(at, min(at + _CHUNK, last)) for at in range(options.first, last, _CHUNK)]
    begun, counts, failures = time.monotonic(), Counts(), []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for some, bad in pool.imap_unordered(run_chunk, chunks):
            counts = total((counts, some))
            failures += bad
            for seed, text in bad:
                print(f"seed {seed}:\n{text}", file=sys.stderr, flush=True)
            seconds = time.monotonic() - begun
            if counts.schedules % 2000 < _CHUNK:
                print(
                    f"{counts.schedules} schedules, {len(failures)} violations, {seconds:.0f} s", flush=True
                )
            if seconds > options.seconds:
                break
    print(
        json.dumps(
            {"seconds": round(time.monotonic() - begun, 1), "violations": len(failures), **vars(counts)}
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
