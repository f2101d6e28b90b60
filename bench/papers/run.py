"""`make papers`: measures the claims of four papers with deltashard and writes docs/papers.md.

A part is a module of this folder, named in `PARTS`:

    measure(quick) -> dict     measures all figures of the part, as JSON values
    headlines(found) -> list   rows for the verdict table at the top of the page
    page(found) -> str         the part's section of the page, Markdown that begins with "##"
    check(found) -> list       sentences about violated orders that hold on every machine; never timings
    plot(found, folder)        optional: writes pictures into `folder` as SVG

A headline is a dict: `what`, `paper` and `ours` (text), `met` (True, False, or None if the figures do not decide),
optionally `partly` (True if only some of the figures reach the claim) and `why` (text, unless the claim is reached).
The result records the error of a part that fails, and the other parts still run. The exit status is 1 if a part failed
or an order is violated.

    bench/papers/run.py                        all parts in full: 15 minutes on two idle cores; writes docs/papers.md
    bench/papers/run.py --quick                small, for CI: runs every part, checks the orders, writes no page
    bench/papers/run.py --only check_n_run,neo
                                               only these parts; the others keep their figures from --out
    bench/papers/run.py --page                 writes the page from the figures in --out, without measuring
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ("check_n_run", "accuracy", "checkfreq", "cpr", "neo")
"""In the order of the page."""
VERSIONS = ("torch", "torchrec", "numpy", "deltashard")

# Only a script gets its folder on the path; this folder comes first (examples/demo has its own `report`).
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "examples" / "demo")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small, for CI; writes no page")
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "papers.json")
    parser.add_argument(
        "--page", action="store_true", help="write the page from the figures in --out, without measuring"
    )
    args = parser.parse_args()
    if args.page:
        known = _previous_results(args.out, quick=False)
        if not known:
            parser.error(f"{args.out} has no figures of a full run")
        print(_page(known))
        return 0
    names = tuple(args.only.split(",")) if args.only else PARTS
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end sidecars and ranks
    import torch

    torch.set_num_threads(1)  # a second core is the sidecar's
    found = _previous_results(args.out, quick=args.quick) if args.only else {}
    parts: dict[str, Any] = found.setdefault("parts", {})
    # Replaced at every run: each part from an older run has its own date.
    found |= {"machine": machine(), "command": _command(), "quick": args.quick}
    violated: list[str] = []
    failed = False
    # Caches of the sidecars that the parts start: a run removes them at its end.
    caches = tempfile.TemporaryDirectory(prefix="deltashard-papers-", ignore_cleanup_errors=True)
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = caches.name
    for name in names:
        part = module(name)
        print(f"{name} ...", flush=True)
        begun = time.monotonic()
        record: dict[str, Any] = {"date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")}
        try:
            # As in the file: keys are text, and a value that is not JSON fails here.
            record["found"] = json.loads(json.dumps(part.measure(args.quick)))
            violated += [f"{name}: {each}" for each in part.check(record["found"])]
        except Exception as error:
            traceback.print_exc()
            record["error"], failed = f"{type(error).__name__}: {error}"[:500], True
        record["took_s"] = time.monotonic() - begun
        parts[name] = record
        print(f"{name}: {record['took_s']:.0f} s", flush=True)
        for row in part.headlines(record["found"]) if "found" in record else ():
            print(f"  {row['what']}: {row['ours']} (paper: {row['paper']}){_format_met(row['met'])}")
    del os.environ["XDG_CACHE_HOME"]
    os.environ |= {} if before is None else {"XDG_CACHE_HOME": before}
    caches.cleanup()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(args.out)
    for sentence in violated:
        print(f"VIOLATED: {sentence}")
    if not args.quick:
        print(_page(found))
    return int(failed or bool(violated))


def _page(found: dict[str, Any]) -> Path:
    import report

    parts = {name: module(name) for name in PARTS if name in found["parts"]}
    return report.write(found, parts, ROOT / "docs")


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def machine() -> dict[str, object]:
    from measuring import cpu_model  # importable because the path has bench/

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
    }


def _previous_results(path: Path, *, quick: bool) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found.get("quick") == quick else {}


def _command() -> str:
    return " ".join(["bench/papers/run.py", *sys.argv[1:]])


def _format_met(met: bool | None) -> str:
    return {True: ": reached", False: ": NOT REACHED", None: ""}[met]


if __name__ == "__main__":
    sys.exit(main())
