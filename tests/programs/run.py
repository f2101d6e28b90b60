"""Draws user programs and judges them; a script, and what the test calls.

python -m tests.programs.run 500                         500 drawn ones
python -m tests.programs.run --each-value                each value of each dimension, alone
python -m tests.programs.run --spec '{"loop": "cycle"}'  this one
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from tests.programs.dimension import DIMENSIONS, Spec, completed, differences, draw
from tests.support.tool import ROOT

GOOD = ("exact", "told", "another loader between epochs", "another program from its beginning")
"""Between epochs a program may give another loader, and before the first checkpoint it may be another one: there is no
uninterrupted run to compare with."""


class Judge:
    """The process that runs programs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def verdict(self, spec: Spec) -> dict[str, Any]:
        """See `zygote.judge`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(differences(spec)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(120)

    def smallest(self, spec: Spec, outcome: str) -> Spec:
        """The same outcome with as many dimensions at their plainest value as possible."""
        smaller = True
        while smaller:
            smaller = False
            for name in differences(spec):
                fewer = completed({key: value for key, value in differences(spec).items() if key != name})
                if (
                    len(differences(fewer)) < len(differences(spec))
                    and self.verdict(fewer)["outcome"] == outcome
                ):
                    spec, smaller = fewer, True
        return spec


def report(specs: Iterable[Spec], *, show: bool = True) -> list[str]:
    """Judge all; one line for each that is neither exact nor told, made as small as it goes."""
    counts: Counter[str] = Counter()
    bad = []
    with Judge() as judge:
        for number, spec in enumerate(specs):
            verdict = judge.verdict(spec)
            outcome = verdict["outcome"]
            kind = (
                f"{outcome}, from the beginning"
                if outcome == "exact" and not verdict["restored"]
                else outcome
            )
            kind += ", with a warning" if outcome == "exact" and verdict["told"] else ""
            counts[kind] += 1
            if show:
                print(number, kind, json.dumps(differences(spec)), *verdict["told"], sep="\n    ", flush=True)
            if outcome not in GOOD:
                small = judge.smallest(spec, outcome) if outcome in ("silent", "crash") else spec
                verdict = judge.verdict(small)
                bad.append(
                    f"{outcome}: {json.dumps(differences(small))}: differs in {verdict.get('differs', [])[:4]}; {verdict['told']}"
                )
                print(bad[-1], flush=True)
    print(dict(counts), flush=True)
    return bad


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int, nargs="?", default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--each-value", action="store_true")
    parser.add_argument("--spec", type=json.loads)
    args = parser.parse_args()
    if args.spec is not None:
        specs = [completed(args.spec)]
    elif args.each_value:
        specs = [completed({name: value}) for name, values in DIMENSIONS.items() for value in values[1:]]
    else:
        specs = [draw(seed) for seed in range(args.first, args.first + args.count)]
    return 1 if report(specs) else 0


if __name__ == "__main__":
    sys.exit(main())
