"""Exit codes and output shared by all commands. Imports no slow modules."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, ParamSpec

import typer

from tandem.protos.error_text import escaped
from tandem.protos.errors import EnvironmentLackError, TandemError, UserError
from tandem.protos.extras import missing_extra_named

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

P = ParamSpec("P")

option = functools.partial(typer.Option, show_default=False)
argument = functools.partial(typer.Argument, show_default=False)


def console() -> Console:
    """A rich console on standard output."""
    from rich.console import Console

    return Console()


def print_line(console: Console, line: str) -> None:
    """Prints lines as they are, but for control characters: without markup, emoji, highlights and line breaks."""
    console.print(escaped(line, "\n"), markup=False, emoji=False, highlight=False, soft_wrap=True)


def plain(text: str) -> Text:
    """Lines for a rich view as they are, but for control characters: without markup and line breaks."""
    from rich.text import Text

    return Text(escaped(text, "\n"), no_wrap=True, overflow="ignore")


def print_text(line: str) -> None:
    """Prints a line on standard output, with control characters escaped."""
    print(escaped(line), flush=True)


def print_error(line: str) -> None:
    """Prints one line for the user on standard error, with control characters escaped."""
    print(f"tandem: {escaped(line)}", file=sys.stderr, flush=True)


def cell(text: str) -> str:
    """Text for a cell of a rich table, without markup and control characters."""
    from rich.markup import escape

    return escape(escaped(text))


def exit_code_of(work: Callable[[], int | None]) -> int:
    """Runs a command or a service, and returns its exit code: 0 for None, 2 for a UserError, 1 for another TandemError,
    130 for Ctrl-C. Errors are printed in one line. Any other exception is a bug and is raised.
    """
    try:
        with full_disk_named(Path.cwd()), missing_extra_named():
            return work() or 0
    except UserError as error:
        print_error(str(error))
        return 2
    except TandemError as error:
        print_error(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def command(function: Callable[P, int]) -> Callable[P, NoReturn]:
    """Turns a function that returns an exit code into a command."""

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> NoReturn:
        def work() -> int:
            code = function(*arguments, **options)
            print(end="", flush=True)
            return code

        code = exit_code_of(work)
        _output_is_written()
        raise typer.Exit(code)

    return run


@contextmanager
def full_disk_named(place: Path) -> Iterator[None]:
    """Turns the OSError of a full disk into an EnvironmentLackError that names the full place: the error's file, else
    standard output if it is full, else `place`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or (place if _output_is_written() else "/dev/stdout")
        raise EnvironmentLackError(f"{where}: the disk is full; free space there and try again") from None


def _output_is_written() -> bool:
    """Flushes standard output. If that fails, returns False and discards the rest: Python would flush again at exit and
    change the exit code.
    """
    try:
        print(end="", flush=True)  # also works without a standard output
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def read_secret_files() -> None:
    """Sets TANDEM_REDIS_URL from the file that TANDEM_REDIS_URL_FILE names: containers get their secrets as files. Ends
    the process with exit code 2 if it cannot be read.
    """
    file = os.environ.get("TANDEM_REDIS_URL_FILE", "")
    if not file or os.environ.get("TANDEM_REDIS_URL"):
        return
    try:
        os.environ["TANDEM_REDIS_URL"] = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        print_error(f"TANDEM_REDIS_URL_FILE: {file}: {error.strerror}; mend that, or set TANDEM_REDIS_URL")
        sys.exit(2)


def run_service(work: Callable[[], int | None]) -> NoReturn:
    """Runs the main function of a process and ends it with its exit code."""
    sys.exit(exit_code_of(work))


def run_service_command(work: Callable[[], None]) -> NoReturn:
    """Runs a service and exits without Python's finalisation, in which threads of gRPC, gloo and CUDA sometimes hang.

    Then a crashed service would not be restarted, and a stopped one would delay the stop of the run.
    """
    try:
        code = exit_code_of(work)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # a bug: its traceback belongs in the log
        traceback.print_exc()
        code = 1
    _output_is_written()
    sys.stderr.flush()
    os._exit(code)
