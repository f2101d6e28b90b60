"""Settings: environment, command line, refusals with a remedy."""

from pathlib import Path

import pytest
from deltashard_checkpoint.codecs import kernel_choice, numpy_kernel
from deltashard_checkpoint.errors import UserError
from deltashard_sidecar.main import EXIT_USAGE, _check_kernels, main
from deltashard_sidecar.settings import RANGES, SettingError, load, variable_of
from deltashard_sidecar.telemetry.structured_logging import configure

from tools.reference_pages.settings import entries

NEEDED = ["--url", "file:///s", "--run", "r", "--dir", "/d", "--cache-dir", "/c"]


def test_flags_override_environment_and_defaults() -> None:
    env = {
        "DELTASHARD_EVERY_S": "30", "DELTASHARD_ENCODING": "q4", "DELTASHARD_ARENA_BYTES": "64MiB", "HOME": "/x",
        "POD_NAME": "it",
    }  # fmt: skip
    got = load([*NEEDED, "--every-s=5", "--synthetic-baselines", "no"], env)
    assert (got.every_s, got.encoding, got.arena_bytes, got.synthetic_baselines) == (
        5.0,
        "q4",
        64 << 20,
        False,
    )
    assert (got.socket_path, got.blocks, got.pod_name) == (Path("/d/sidecar.sock"), 8, "it")
    assert load(NEEDED, {"DELTASHARD_SOCKET": "/run/x.sock"}).socket_path == Path("/run/x.sock")
    names = [variable_of(name) for name in ("pod_namespace", "pod_uid", "node_name", "run")]
    assert names == ["POD_NAMESPACE", "POD_UID", "NODE_NAME", "DELTASHARD_RUN"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "missing: --url"),
        ([*NEEDED, "--colour", "red"], "unknown argument '--colour'"),
        ([*NEEDED, "url"], "unknown argument 'url'"),
        ([*NEEDED, "--every-s"], "--every-s needs a value"),
        ([*NEEDED, "--every-s", "soon"], "'soon' is not a valid float"),
        ([*NEEDED, "--encoding", "q5"], "one of fp32"),
        ([*NEEDED, "--block-bytes", "1000"], "block_bytes is 1000"),
        ([*NEEDED, "--arena-bytes", "64MiB", "--block-bytes", "32MiB"], "too small"),
        ([*NEEDED, "--cache-bytes", "infGiB"], "'infGiB' is not a valid int"),
        ([*NEEDED, "--every-s", "nan"], "every_s is nan"),
        ([*NEEDED, "--run", "../other"], "cannot name a run"),
        ([*NEEDED, "--synthetic-baselines", "perhaps"], "not a valid bool"),
        (
            [*NEEDED, "--min-interval-s", "60", "--max-interval-s", "10"],
            "no interval is at least 60 s and at most 10 s",
        ),
    ],
)
def test_invalid_settings_are_refused_at_startup(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(argv, {})


def test_numbers_outside_their_range_are_refused() -> None:
    """The message has the flag, the variable and the range. Both ends of the range are valid."""
    assert set(RANGES) == {name for name, kind, *_ in entries() if kind in {"int", "float"}}
    for name, (least, most) in RANGES.items():
        flag = f"--{name.replace('_', '-')}"
        for value in (least - 1, most + 1):
            with pytest.raises(SettingError, match=rf"^{name} is {int(value)}(\.0)? .*{flag}.*from"):
                load([*NEEDED, flag, str(int(value))], {})
        for value in (least, most):
            grown = ["--arena-bytes", "64GiB"] if name == "block_bytes" else []
            assert getattr(load([*NEEDED, *grown, flag, str(int(value))], {}), name) == value


@pytest.mark.parametrize(
    ("text", "message"), [("soon", "not a valid float"), ("-1", "is -1.0"), ("nan", "is nan")]
)
def test_hook_deadline_is_validated(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["notify", "--deadline-s", text]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_numpy_kernels_are_refused_only_in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "active", lambda: numpy_kernel)
    _check_kernels(load(NEEDED, {}), configure("error", run="r"))
    with pytest.raises(UserError, match="too slow for a pod"):
        _check_kernels(load([*NEEDED, "--workload-uid", "w-1"], {}), configure("error", run="r"))
