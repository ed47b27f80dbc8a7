"""What every command has in common: how it ends, and where it prints. Imports nothing heavy."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from tandem.protos.errors import EnvironmentLackError, TandemError, UserError
from tandem.services.extras import missing_extra_named

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Standard output, as rich sees it."""
    from rich.console import Console

    return Console()


def complain(line: str) -> None:
    """A line for the user on standard error."""
    print(f"tandem: {line}", file=sys.stderr, flush=True)


def finish(work: Callable[[], int]) -> NoReturn:
    """Ends the command with its exit code; what the user can mend is one line and exit code 2, never a traceback."""
    try:
        with full_disk_named(Path.cwd()), missing_extra_named():
            code = work()
            print(end="", flush=True)
    except UserError as error:
        complain(str(error))
        code = 2
    except TandemError as error:
        complain(f"{type(error).__name__}: {error}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    _output_is_written()
    raise typer.Exit(code)


@contextmanager
def full_disk_named(place: Path) -> Iterator[None]:
    """Turns what a full disk raises into one line; `place` is named where the error names no file and standard output
    has room.

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
    """True if nothing is held back that standard output does not take. What it does not take is given up: Python would
    try again as it ends, and end with an exit code of its own.
    """
    try:
        print(end="", flush=True)  # which also does where there is no standard output at all
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def end_with(work: Callable[[], None]) -> NoReturn:
    """Runs a service and ends its process without Python's finalisation, in which the threads of gRPC, gloo and CUDA
    are known to
    hang: a service that crashed but does not end is never started again, and one that stopped holds up the stop of the
        run.
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
    except BaseException:  # a bug: its traceback belongs into the log, as ever
        traceback.print_exc()
    _output_is_written()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
