"""`deltashard`: plan, inspect, verify, restore, export, import and clean up runs on any store.

Exit codes: 0 success; 1 problems in the stored data, even if the command worked around them (`diff`: differences);
2 caller error (usage, URL, credentials, output path, no such run or checkpoint); 3 environment failure (store or disk),
a retry may help; 4 a bug in deltashard; 130 interrupted. With `--json` an error is also a JSON document on stdout.
"""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import EntryPoint, entry_points

import click
from deltashard_checkpoint.errors import DeltashardError, EnvironmentFault, FormatError, UserError

from deltashard_cli import (
    copy_command,
    gc_command,
    log_command,
    read_command,
    reclaim_command,
    repair_command,
    user_entry_command,
    write_command,
)
from deltashard_cli.output import discard_stdout, escaped, note, print_json, warnings

OK = 0
PROBLEMS = 1
USAGE = 2
ENVIRONMENT = 3
INTERNAL = 4
INTERRUPTED = 130

_EXIT_CODES = """
\b
Exit codes:
  0  success
  1  problems in the stored data, even if the command worked around them; `diff`: differences
  2  caller error: usage, URL, credentials, output path, no such run or checkpoint
  3  environment failure (store, disk, network); a retry may help
  4  a bug in deltashard
  130  interrupted, or a question answered with no
"""


EXTRAS = "deltashard.commands"
"""Entry point group of commands outside the core: plan, export, import, and commands of other packages."""


class Commands(click.Group):
    """The core commands, imported eagerly, and the commands of extras, loaded when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=EXTRAS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (core := super().get_command(ctx, cmd_name)) is not None:
            return core
        for extra in entry_points(group=EXTRAS, name=cmd_name):
            try:
                found: click.Command = extra.load()
            except ImportError as error:
                return _not_installed(extra, error)
            return found
        return None


def _not_installed(extra: EntryPoint, error: ImportError) -> click.Command:
    """Return a placeholder command whose help and error name the missing package."""
    what = f"`deltashard {extra.name}` needs {error.name or error}, which is not installed"

    def refuse(*_given: object, **_options: object) -> None:
        raise UserError(what, where=extra.value, remedy="install it in deltashard's environment")

    return click.Command(
        extra.name,
        callback=refuse,
        help=f"{what}.",
        params=[click.Argument(["given"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
    )


@click.group(
    cls=Commands,
    epilog=_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="deltashard")
def cli() -> None:
    """Plan, inspect, verify, restore, export and clean up deltashard checkpoints.

    URL is a store (s3://bucket/prefix?endpoint=..., gs://bucket/prefix, az://container/prefix?account=...,
    file:///dir or a path) or a run in a store (URL/RUN).
    Credentials come from AWS_*, MINIO_*, GOOGLE_* or AZURE_* variables, or from the shared AWS credentials file.
    """


@cli.result_callback()
@click.pass_context
def _end(context: click.Context, /, _result: object, **_options: object) -> None:
    if warnings(context):
        context.exit(PROBLEMS)


for command in (
    read_command.ls,
    read_command.inspect,
    log_command.log,
    read_command.verify,
    read_command.diff,
    repair_command.scan,
    repair_command.repair,
    write_command.restore,
    user_entry_command.pin,
    user_entry_command.unpin,
    user_entry_command.retire,
    user_entry_command.rewind,
    copy_command.cp,
    copy_command.rm,
    reclaim_command.reclaim,
    gc_command.gc,
    write_command.compact,
):
    cli.add_command(command)


def exit_code(error: BaseException) -> int:
    match error:
        case FormatError():
            return PROBLEMS
        case UserError() | click.ClickException():
            return USAGE
        case EnvironmentFault() | OSError() | MemoryError():
            return ENVIRONMENT
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
    return INTERNAL


def main(arguments: list[str] | None = None) -> None:
    run_group(cli, arguments, name="deltashard")


def run_group(group: click.Group, arguments: list[str] | None, *, name: str) -> None:
    """Run a command group under `name` and exit: every error becomes a message and an exit code.

    A call without arguments prints the help and exits with the code of a usage error.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = group.main(given or ["--help"], prog_name=name, standalone_mode=False) or (
            OK if given else USAGE
        )
    except (KeyboardInterrupt, click.Abort):
        sys.stderr.write("interrupted\n")
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # click exits (with 1, which means "problems" here) only when the reader of its pipe is gone.
        discard_stdout()
        code = OK
    except Exception as raised:  # noqa: BLE001 - outermost level: every error becomes a message and an exit code
        found = wrap_os_error(raised)
        code = exit_code(found)
        _show(found, code, name=name, as_json="--json" in given)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    sys.exit(code if isinstance(code, int) else OK)


class LocalFault(EnvironmentFault):
    """A file, a directory or the memory of this machine failed."""


def wrap_os_error(error: Exception) -> Exception:
    """Return the error to show: an `OSError` or `MemoryError` gets a place and a remedy."""
    if isinstance(error, MemoryError):
        return LocalFault("out of memory", where="this process", remedy="give it more memory")
    if not isinstance(error, OSError):
        return error
    return LocalFault(
        error.strerror or f"{type(error).__name__}: {error}",
        where=str(error.filename or "this machine"),
        remedy="check the path, its owner and permissions, and the free space on its disk",
    )


def _show(error: Exception, code: int, *, name: str, as_json: bool) -> None:
    what, where, remedy = f"{type(error).__name__}: {error}", "", ""
    if isinstance(error, DeltashardError):
        what, where, remedy = error.what, error.where, error.remedy
    elif isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        what, where = error.format_message(), name if context is None else context.command_path
        remedy = f"see `{where} --help`"
    if code == INTERNAL:
        remedy = remedy or "this is a bug in deltashard: please report it with the trace above"
        sys.stderr.write(escaped(traceback.format_exc(), lines=True))
    if as_json:
        kind = type(error).__name__
        print_json({"error": {"kind": kind, "what": what, "where": where, "remedy": remedy, "exit": code}})
    note(what, label="error", style="bold red")
    if where:
        note(where, label="  where", style="dim")
    if remedy:
        note(remedy, label="  try", style="dim")


if __name__ == "__main__":
    main()
