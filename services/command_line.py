"""What every command has in common: how it ends, and where it prints. Imports nothing heavy."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from protos.errors import TandemError, UserError

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
        code = work()
    except UserError as error:
        complain(str(error))
        code = 2
    except TandemError as error:
        complain(f"{type(error).__name__}: {error}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        complain(f"{error.filename or Path.cwd()}: the disk is full; free space there and try again")
        code = 2
    raise typer.Exit(code)


def end_with(work: Callable[[], None]) -> NoReturn:
    """Runs a service and ends its process without Python's finalisation, in which the threads of gRPC, gloo and CUDA are known to
    hang: a service that crashed but does not end is never started again, and one that stopped holds up the stop of the run."""
    from services.process import run_service

    code: object = 1
    try:
        run_service(work)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # a bug: its traceback belongs into the log, as ever
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
