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

from tandem.protos.errors import EnvironmentLackError, TandemError, UserError
from tandem.protos.extras import missing_extra_named

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")


def console() -> Console:
    """Returns a rich console on standard output."""
    from rich.console import Console

    return Console()


def print_error(line: str) -> None:
    """Prints one line for the user on standard error."""
    print(f"tandem: {line}", file=sys.stderr, flush=True)


def command(function: Callable[P, int]) -> Callable[P, NoReturn]:
    """Turns a function that returns an exit code into a command. A UserError prints one line and exits with code 2."""

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> NoReturn:
        try:
            with full_disk_named(Path.cwd()), missing_extra_named():
                code = function(*arguments, **options)
                print(end="", flush=True)
        except UserError as error:
            print_error(str(error))
            code = 2
        except TandemError as error:
            print_error(f"{type(error).__name__}: {error}")
            code = 1
        except KeyboardInterrupt:
            code = 130
        _output_is_written()
        raise typer.Exit(code)

    return run


@contextmanager
def full_disk_named(place: Path) -> Iterator[None]:
    """Turns the OSError of a full disk into one line that names the full place.

    That is the error's file, otherwise standard output if it is full, otherwise `place`.

    Raises:
        EnvironmentLackError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or (place if _output_is_written() else "/dev/stdout")
        raise EnvironmentLackError(f"{where}: the disk is full; free space there and try again") from None


def _output_is_written() -> bool:
    """Flushes standard output. Returns False and discards the rest if that fails.

    Otherwise Python would flush again at exit and change the exit code.
    """
    try:
        print(end="", flush=True)  # also works without a standard output
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def run_service_command(work: Callable[[], None]) -> NoReturn:
    """Runs a service and exits without Python's finalisation.

    Threads of gRPC, gloo and CUDA sometimes hang in it. Then a crashed service would not be restarted, and a stopped
    one would delay the stop of the run.
    """
    from tandem.services.process import run_service

    def guarded() -> None:
        with full_disk_named(Path.cwd()):
            work()

    code: object = 1
    try:
        run_service(guarded)
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # a bug: its traceback belongs in the log
        traceback.print_exc()
    _output_is_written()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
