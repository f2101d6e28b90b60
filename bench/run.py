"""`make bench`: every bench module in turn, one table, and out/bench.json. A missed bar does not fail it.

A bench module has `run(quick=...) -> dict`; what it returns goes into bench.json under the module's name. Under
"rows" it may list rows for the table: dicts with `what`, `ours`, `unit`, `peer`, `theirs`, `ratio`, `bar` (of the
design) and `met` (None: no bar). The result has the error of a module that fails, and the other modules still run.

Torch computes on one thread for all checkpointers. A second core is for the sidecar or for threads of the peers.

    bench/run.py                        everything that measures this machine, in full
    bench/run.py --quick                a smoke test, for CI
    bench/run.py checkpointing tracking  only these
    bench/run.py group                  four ranks against torch.distributed.checkpoint, 2 GiB
    bench/run.py gpu                    tables on a GPU, 8 GiB
    bench/run.py ranks                  4,096 ranks, simulated: docs/scale-ranks.md
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from pathlib import Path

from measuring import cpu_model
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
MODULES = ("codec_speeds", "tracking", "checkpointing", "slowdown", "group", "ranks", "gpu")
ONLY_IF_NAMED = ("group", "ranks", "gpu")
"""The full measurements take gigabytes and minutes: `make bench-group`, `make bench-ranks`, `make bench-cuda`."""
COLUMNS = (
    ("what", "left"),
    ("ours", "right"),
    ("peer", "left"),
    ("theirs", "right"),
    ("ratio", "right"),
    ("bar", "right"),
    ("", "left"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help=f"any of: {', '.join(MODULES)}")
    parser.add_argument("--quick", action="store_true", help="small states, one round")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "bench.json")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end servers and sidecars
    console = Console(width=None if sys.stdout.isatty() else 150)
    found: dict[str, object] = {"machine": _machine(), "quick": args.quick}
    failed = False
    for name in args.modules or [m for m in MODULES if args.quick or m not in ONLY_IF_NAMED]:
        console.print(f"[bold]{name}[/] ...")
        begun = time.monotonic()
        try:
            result = importlib.import_module(name).run(quick=args.quick)
        except Exception as error:
            traceback.print_exc()
            result, failed = {"error": f"{type(error).__name__}: {error}"}, True
        result["took_s"] = time.monotonic() - begun
        found[name] = result
        _print(console, name, result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
    console.print(f"{args.out}")
    return int(failed)


def _machine() -> dict[str, object]:
    import torch

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def _print(console: Console, name: str, result: dict[str, object]) -> None:
    rows = result.get("rows")
    if isinstance(rows, list):
        table = Table(title=f"{name} ({result['took_s']:.0f} s)")
        for title, side in COLUMNS:
            table.add_column(title, justify=side)  # type: ignore[arg-type]
        for row in rows:
            met = row.get("met")
            table.add_row(
                str(row["what"]),
                _quantity(row.get("ours"), str(row.get("unit", ""))),
                str(row.get("peer") or ""),
                _quantity(row.get("theirs"), str(row.get("unit", ""))),
                "" if row.get("ratio") is None else f"{row['ratio']:.2f} x",
                _bar(row),
                "" if met is None else "met" if met else "[bold red]not met[/]",
            )
        console.print(table)
    for what, error in dict(result.get("errors") or {}).items():  # type: ignore[call-overload]
        console.print(f"[red]{what} could not run:[/] {error}")


def _bar(row: dict[str, object]) -> str:
    bar = row.get("bar")
    if bar is None:
        return ""
    return (
        f">= {bar:.4g} x"
        if row.get("ratio") is not None
        else f"<= {_quantity(bar, str(row.get('unit', '')))}"
    )


def _quantity(value: object, unit: str) -> str:
    if value is None:
        return ""
    assert isinstance(value, int | float)
    if unit == "s":
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
    if unit == "B":
        return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB"
    return f"{value:,.0f} {unit}".strip() if value >= 1e4 else f"{value:.4g} {unit}".strip()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
