"""Pages are read and run as their readers would, and whatever is wrong with one is found."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cluster.scenario import page as pages
from tests.cluster.scenario.page import PageError, Step
from tests.support.server.minio_server import ROOT

PAGE = """# A page

Some prose.

```sh
echo one   two
echo three
```

```text
one two
...
thr...
```

More of it.

<!-- not run: needs an engine -->
```sh
docker build .
```

```yaml
key: value
```
"""


def _run(steps: list[Step], folder: Path, timeout_s: float = 60.0) -> list[str]:
    outputs: list[str] = []
    pages.run(
        steps,
        folder=folder,
        environment=os.environ,
        timeout_s=timeout_s,
        done=lambda _step, output, _seconds: outputs.append(output),
    )
    return outputs


def test_steps_of_a_page(tmp_path: Path) -> None:
    """Commands with what they should print, and which of them are not run and why."""
    first, second = pages.read(PAGE)
    assert first == Step(line=5, commands="echo one   two\necho three", expected=("one two", "...", "thr..."))
    assert second.not_run == "needs an engine"
    assert _run([first, second], tmp_path) == ["one two\nthree\n"]


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("```text\nout\n```\n", "belongs to no command"),
        ("```sh\ntrue\n```\nprose\n```text\nout\n```\n", "belongs to no command"),
        ("```sh\ntrue\n", "does not end"),
        ("```\ntrue\n```\n", "without a language"),
        ("<!-- not run: no -->\n```sh\ntrue\n```\n```text\nout\n```\n", "cannot be checked"),
    ],
)
def test_a_page_written_wrongly_is_refused(page: str, says: str) -> None:
    """Nothing that looks like a command or its output goes unnoticed."""
    with pytest.raises(PageError, match=says):
        pages.read(page)


@pytest.mark.parametrize(
    ("commands", "expected", "says"),
    [
        ("false\necho never", (), "ended with 1"),
        ("false | cat", (), "ended with 1"),
        ("echo $UNSET_VARIABLE", (), "ended with 1"),
        ("echo one; echo two", ("two", "one"), "did not print 'one'"),
        ("echo one", ("one more",), "did not print"),
        ("echo more than one", ("one",), "did not print"),
        ("sleep 60", (), "took longer"),
    ],
)
def test_a_step_that_does_not_do_what_it_says_fails(
    commands: str, expected: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    """Whole lines in their order count, and every command of a block."""
    with pytest.raises(PageError, match=says):
        _run(
            [Step(line=1, commands=commands, expected=expected)], tmp_path, 0.5 if "sleep" in commands else 60
        )


@pytest.mark.parametrize(
    ("line", "output", "fits"),
    [
        ("NAME ... STEP ...", "NAME   STEP", True),
        ("NAME ... STEP ...", "NAME   PHASE   STEP   AGE", True),
        ("NAME ... STEP", "NAME   PHASE   STEP   AGE", False),
        ("NAME ... STEP", "NAMES  STEP", False),
        ("pod-...  1/1", "pod-x7f2   1/1", True),
    ],
)
def test_what_three_dots_stand_for(line: str, output: str, fits: bool) -> None:
    """Anything or nothing, in whole words where they stand alone."""
    assert (pages.missing((line,), output) is None) == fits


def test_pages_of_kubernetes_are_well_written() -> None:
    """Their commands name files that exist and clients that the runner provides."""
    found = [
        path for path in sorted((ROOT / "docs" / "kubernetes").glob("*.md")) if "```sh" in path.read_text()
    ]
    assert "ten-minutes.md" in {path.name for path in found}
    for path in found:
        for step in pages.read(path.read_text()):
            for name in re.findall(r"-f (\S+)", step.commands):
                assert (ROOT / name).exists(), f"{path.name}:{step.line}: {name}"


def test_the_tests_that_the_incidents_page_names_exist() -> None:
    """Each file, and in it at least one test of each name, which may end in a star."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+)(\*?))?`", (ROOT / "docs/incidents.md").read_text())
    assert len(named) > 20
    for file, name, star in named:
        text = (ROOT / file).read_text()
        assert re.search(rf"^def {name}{'' if star else r'[(]'}", text, re.MULTILINE) if name else text, (
            file,
            name,
        )
