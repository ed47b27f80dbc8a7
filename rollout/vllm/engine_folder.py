"""Where an engine keeps its sockets and temporary files, so that none is left behind whichever way it ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path

from tandem.protos.scratch_folder import ScratchFolder, remove, sweep

_KIND = "vllm"
_LONGEST_SOCKET_PATH = 107  # bytes: `sun_path` less its end
_SOCKET_NAME = 1 + 36  # vLLM's: a slash and a UUID
_SHARED_MEMORY = Path("/dev/shm")


class EngineFolder(ScratchFolder):
    """The folder of one engine. Making it removes those of engines that have ended."""

    def __init__(self) -> None:
        super().__init__(_KIND, longest_path=_LONGEST_SOCKET_PATH - _SOCKET_NAME, clear=_remove_engine_folder)

    @contextmanager
    def given_to_children(self) -> Iterator[None]:
        """Processes started or forked inside, and vLLM's part in this one, put into the folder what they would put into
        /tmp.
        """
        names = ("TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR")
        variables, place = {name: os.environ.get(name) for name in names}, tempfile.gettempdir()
        # Compiled kernels are for the next engine, too.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(place, f"torchinductor_{os.getuid()}"))
        os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = str(self.path)
        try:
            yield
        finally:
            tempfile.tempdir = place
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def sweep_engine_folders() -> None:
    """Removes what engines that were killed left on this machine; nothing of one that lives."""
    sweep(_KIND, clear=_remove_engine_folder)


def name_shared_memory() -> None:
    """In a process that lives in an engine's folder: Python's shared memory is named for the folder from here on. By
    the names that Python makes up, what a killed engine leaves could not be told from that of others.
    """
    place = Path(tempfile.gettempdir())
    if place.name.startswith(f"tandem-{_KIND}-"):
        shared_memory._SHM_NAME_PREFIX = f"/{_own_name(place)}"  # type: ignore[attr-defined]  # there is no public way


def _own_name(folder: Path) -> str:
    """What no other folder's name ends with."""
    return folder.name.rpartition("-")[2]


def _remove_engine_folder(folder: Path) -> None:
    """The folder, and the shared memory of its tensor-parallel workers: it is named for the folder, or for the file in
    it by which they met.
    """
    names = [f"{_own_name(folder)}[0-9a-f][0-9a-f][0-9a-f][0-9a-f]"]
    names += [f"{meeting.name}-*" for meeting in folder.glob("vllm_dist_*")]
    for segment in (segment for name in names for segment in _SHARED_MEMORY.glob(name)):
        segment.unlink(missing_ok=True)
    remove(folder)
