"""Folder for an engine's sockets and temporary files, so that they are removed even if the engine is killed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path

from tandem.protos.scratch_folder import ScratchFolder, remove, sweep

WORKER_EXTENSION = "tandem.rollout.vllm.worker_extension.WeightReceiver"
"""The class that adds Tandem's calls to vLLM's workers."""
_KIND = "vllm"
_LONGEST_SOCKET_PATH = 107  # bytes: `sun_path` without its terminator
_SOCKET_NAME = 1 + 36  # vLLM's: a slash and a UUID
_SHARED_MEMORY = Path("/dev/shm")


class EngineFolder(ScratchFolder):
    """The folder of one engine. Its creation removes the folders of engines that have ended."""

    def __init__(self) -> None:
        super().__init__(_KIND, longest_path=_LONGEST_SOCKET_PATH - _SOCKET_NAME, clear=_remove_engine_folder)

    @contextmanager
    def given_to_children(self) -> Iterator[None]:
        """Redirects temporary files of vLLM in this process, and of child processes started inside, to the folder."""
        names = {"TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR"}
        before, place = {name: os.environ[name] for name in names & os.environ.keys()}, tempfile.gettempdir()
        # Compiled kernels are kept for the next engine.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(place, f"torchinductor_{os.getuid()}"))
        os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = str(self.path)
        try:
            yield
        finally:
            tempfile.tempdir = place
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before)


def sweep_engine_folders() -> None:
    """Removes the folders that killed engines left on this machine. Live engines keep theirs."""
    sweep(_KIND, clear=_remove_engine_folder)


def name_shared_memory() -> None:
    """Names this process's later shared memory after its engine folder, so that a killed engine's can be found."""
    place = Path(tempfile.gettempdir())
    if place.name.startswith(f"tandem-{_KIND}-"):
        shared_memory._SHM_NAME_PREFIX = f"/{_own_name(place)}"  # type: ignore[attr-defined]  # there is no public way


def _own_name(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


def _remove_engine_folder(folder: Path) -> None:
    """Removes the folder and the shared memory named after it, or after the workers' rendezvous file in it."""
    names = [f"{_own_name(folder)}[0-9a-f][0-9a-f][0-9a-f][0-9a-f]"]
    names += [f"{meeting.name}-*" for meeting in folder.glob("vllm_dist_*")]
    for segment in (segment for name in names for segment in _SHARED_MEMORY.glob(name)):
        segment.unlink(missing_ok=True)
    remove(folder)
