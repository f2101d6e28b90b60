"""The `deltashard` command: thin commands over pure functions, on any store."""

from importlib.util import find_spec

if find_spec("click") is None or find_spec("rich") is None:
    raise SystemExit(
        "the command deltashard needs the packages click and rich: pip install 'deltashard[cli]'"
    )
