"""The run folder: its lock, the address of a running run, and the default folder of a command."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

from tandem.protos.error_text import printable
from tandem.protos.errors import ConfigError, EnvironmentLackError, RunExistsError, UnavailableError
from tandem.services.config import Recipe
from tandem.services.process import lock_file
from tandem.trainer.batch.record import BATCHES_FOLDER
from tandem.trainer.checkpoints.durable import write_file

CONFIG_FILE = "config.json"
HF_FOLDER = "hf"
EXPORTS_FOLDER = "exports"
SUMMARY_FILE = "summary.json"
LOCK_FILE = "supervisor.lock"
_FULL_DISK_BYTES = 1 << 20
_LOCK_WAIT_SECONDS = 1.0  # `running` holds a shared lock for a moment; a supervisor that starts then waits for it


@dataclass(frozen=True, slots=True)
class RunAddress:
    """Addresses of a running run. `control` is the supervisor's gRPC address; `token` and the folder `certificates`
    ("" without TLS) are for it and the services.
    """

    pid: int
    redis_url: str
    control: str
    token: str
    certificates: str = ""


class RunLock(AbstractContextManager["RunLock"]):
    """Locks a run folder for one supervisor, until that process ends.

    Raises RunExistsError if another supervisor holds the folder, EnvironmentLackError if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_private(folder / LOCK_FILE, "a+")
        except OSError as error:
            raise cannot_write(folder, error) from None
        if not lock_file(self._file, _LOCK_WAIT_SECONDS):
            self._file.close()
            raise folder_in_use(folder, running(folder))
        self._file.truncate(0)

    def publish(self, address: RunAddress) -> None:
        """Writes the run's addresses for other processes to read."""
        self._file.seek(0)
        self._file.truncate(0)
        self._file.write(json.dumps(asdict(address)))
        self._file.flush()

    def __exit__(self, *_exception: object) -> None:
        try:
            self._file.truncate(0)
        finally:
            self._file.close()


def running(folder: Path) -> RunAddress | None:
    """The addresses of the folder's run, or None if no supervisor holds the folder or it is still starting."""
    with suppress(OSError, json.JSONDecodeError), open(folder / LOCK_FILE, encoding="utf-8") as file:
        if not lock_file(file, shared=True):
            return RunAddress(**json.loads(file.read()))
    return None


def folder_in_use(folder: Path, owner: RunAddress | None) -> RunExistsError:
    """The error for a folder in which another supervisor runs."""
    pid = f" (pid {owner.pid})" if owner else ""
    remedy = "stop that one first, or choose another run.folder"
    return RunExistsError(f"run folder {folder}: another supervisor{pid} runs in it; {remedy}")


def find_run(argument: str | None) -> Path:
    """The given run folder, or the newest one under `runs/`. Raises ConfigError if there is none."""
    if argument:
        folder = Path(argument)
        if not os.path.isfile(folder / CONFIG_FILE):  # `Path.is_file` raises for a name that is too long
            raise ConfigError(
                f"{printable(argument)} is not a run folder: it holds no {CONFIG_FILE}; `tandem run` writes one"
            )
        return folder
    found = sorted(Path("runs").glob(f"*/{CONFIG_FILE}"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ConfigError("no run found under runs/; name a run folder, or start one with `tandem demo`")
    return found[-1].parent


def resume_command(folder: Path) -> str:
    """The command that resumes the run in a folder."""
    return f"tandem run {folder / CONFIG_FILE} --resume"


def step_taken(folder: Path) -> bool:
    """Whether the folder holds a run that has recorded a batch. A run without one can be started over."""
    return any((folder / BATCHES_FOLDER).glob("[0-9]*"))


def external_redis_url(recipe: Recipe) -> str:
    """The Redis URL set in the recipe or in TANDEM_REDIS_URL; "" for an embedded Redis."""
    return recipe.run.redis_url or os.environ.get("TANDEM_REDIS_URL", "")


@contextmanager
def redis_required() -> Iterator[None]:
    """Inside, a Redis that cannot be reached is the user's error, because nobody restarts it."""
    try:
        yield
    except UnavailableError as error:
        raise EnvironmentLackError(str(error)) from None


def redis_url_of(recipe: Recipe) -> str:
    """The Redis URL: as configured, else of the running supervisor. Raises EnvironmentLackError if there is none."""
    if url := external_redis_url(recipe):
        return url
    if address := running(recipe.folder):
        return address.redis_url
    remedy = "start `tandem run` first, or set run.redis_url or TANDEM_REDIS_URL"
    raise EnvironmentLackError(f"no Redis: nothing runs in {recipe.folder}; {remedy}")


def open_private(file: Path, mode: str) -> IO[str]:
    """Opens a text file that no other user may read. Raises OSError."""
    opened: IO[str] = open(file, mode, encoding="utf-8", opener=partial(os.open, mode=0o600))  # noqa: SIM115 (returned)
    os.fchmod(opened.fileno(), 0o600)  # it may have existed
    return opened


def write_text(file: Path, text: str, *, private: bool = False) -> None:
    """Replaces a file's text atomically. `private`: no other user may read it. Raises EnvironmentLackError if it cannot
    be written.
    """
    try:
        write_file(file, text.encode(), private=private)
    except OSError as error:
        raise cannot_write(file, error) from None


def cannot_write(path: Path, error: OSError) -> EnvironmentLackError:
    """The error for a file or folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fault = "the disk is full; free space there"
    elif isinstance(error, FileExistsError | NotADirectoryError):
        fault = "a file stands where a folder is needed; move it away"
    else:
        fault = f"cannot be written ({error.strerror}); mend that"
    return EnvironmentLackError(f"{path}: {fault}, or choose another run.folder")


def disk_full(folder: Path) -> bool:
    """True if less than 1 MiB is free on the folder's disk."""
    return shutil.disk_usage(folder).free < _FULL_DISK_BYTES
