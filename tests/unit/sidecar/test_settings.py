"""Settings: environment, command line, refusals with a remedy, and the reference page."""

from pathlib import Path

import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_sidecar.main import EXIT_USAGE, main
from deltashard_sidecar.settings import RANGES, SettingError, Settings, load

from tools.settings_page import PAGE, entries, reference

NEEDED = ["--url", "file:///s", "--run", "r", "--dir", "/d", "--cache-dir", "/c"]


def test_flags_override_the_environment() -> None:
    """And both override the default."""
    env = {
        "DELTASHARD_EVERY_S": "30",
        "DELTASHARD_ENCODING": "q4",
        "DELTASHARD_ARENA_BYTES": "64MiB",
        "HOME": "/x",
    }
    got = load([*NEEDED, "--every-s=5", "--prefetch", "no"], env)
    assert (got.every_s, got.encoding, got.arena_bytes, got.prefetch) == (5.0, "q4", 64 << 20, False)
    assert got.socket_path == Path("/d/sidecar.sock")
    assert got.blocks == 8


def test_the_socket_variable_names_the_socket() -> None:
    """As injected into pods."""
    assert load(NEEDED, {"DELTASHARD_SOCKET": "/run/x.sock"}).socket_path == Path("/run/x.sock")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "missing: --url"),
        ([*NEEDED, "--colour", "red"], "unknown argument '--colour'"),
        ([*NEEDED, "url"], "unknown argument 'url'"),
        ([*NEEDED, "--every-s"], "--every-s needs a value"),
        ([*NEEDED, "--every-s", "soon"], "'soon' is no float"),
        ([*NEEDED, "--every-steps", "-1"], "every_steps is -1 .*from 0 to 9007199254740992"),
        ([*NEEDED, "--encoding", "q5"], "one of fp32"),
        ([*NEEDED, "--differential", "some"], "one of full"),
        ([*NEEDED, "--block-bytes", "1000"], "block_bytes is 1000"),
        ([*NEEDED, "--arena-bytes", "24MiB"], "arena_bytes is 25165824"),
        ([*NEEDED, "--arena-bytes", "64MiB", "--block-bytes", "32MiB"], "too small"),
        ([*NEEDED, "--cache-bytes", "infGiB"], "'infGiB' is no int"),
        ([*NEEDED, "--every-s", "nan"], "every_s is nan"),
        ([*NEEDED, "--run", "../other"], "cannot name a run"),
        ([*NEEDED, "--keep-last", "0"], "keep_last is 0"),
        ([*NEEDED, "--prefetch", "perhaps"], "no bool"),
        ([*NEEDED, "--least-s", "60", "--most-s", "10"], "no interval is at least 60 s and at most 10 s"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(argv: list[str], says: str) -> None:
    """With a sentence that names the setting."""
    with pytest.raises(UserError, match=says):
        load(argv, {})


def test_every_number_has_a_range_and_is_refused_outside_of_it() -> None:
    """With its flag, its variable and the range; both ends themselves are served, other settings permitting."""
    numbers = {name for name, kind, *_ in entries() if kind in {"int", "float"}}
    assert set(RANGES) == numbers
    for name, (least, most) in RANGES.items():
        flag = f"--{name.replace('_', '-')}"
        for value in (least - 1, most + 1):
            with pytest.raises(SettingError) as refused:
                load([*NEEDED, flag, str(int(value))], {})
            assert (
                refused.value.what == f"{name} is {int(value)}"
                or refused.value.what == f"{name} is {float(value)}"
            )
            assert flag in refused.value.where
            assert "from" in refused.value.remedy
        for value in (least, most):
            grown = ["--arena-bytes", "64GiB"] if name == "block_bytes" else []
            assert getattr(load([*NEEDED, *grown, flag, str(int(value))], {}), name) == value


@pytest.mark.parametrize(("text", "says"), [("soon", "no float"), ("-1", "is -1.0"), ("nan", "is nan")])
def test_the_hooks_deadline_is_judged_too(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a message, not a trace."""
    assert main(["notify", "--deadline-s", text]) == EXIT_USAGE
    assert says in capsys.readouterr().err


def test_every_setting_is_documented_and_the_page_is_fresh() -> None:
    """Regenerate with `python -m tools.settings_page`."""
    assert [row[0] for row in entries()] == list(Settings.__dataclass_fields__)
    assert PAGE.read_text() == reference()


def test_the_smallest_cache_that_a_policy_may_ask_for_is_served() -> None:
    """The operator gives the sidecar nine tenths of the volume; a policy's least is 64 MiB."""
    least = (64 << 20) * 9 // 10
    assert load([*NEEDED, "--cache-bytes", str(least)], {}).cache_bytes == least
