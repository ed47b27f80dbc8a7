"""The trainer's ranks on this machine, as child processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from tandem.protos.store_source import StoreSource, file_store
from tandem.trainer.backend.registry import RANK_STORE

log = logging.getLogger(__name__)

STOPPED = 128 + signal.SIGTERM
_POLL_SECONDS = 0.05
_STOP_SECONDS = 30.0  # for ranks that were told to stop; the supervisor kills earlier


class LocalRanks(AbstractContextManager["LocalRanks"]):
    """Starts `command` once for each rank; they meet in `store`. Leaving the block kills those that still run."""

    def __init__(
        self,
        command: Sequence[str],
        store: StoreSource,
        num_ranks: int,
        *,
        first_rank: int = 0,
        world_size: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._first_rank = first_rank
        self._stop_deadline = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        shared = {
            **(environment or {}),
            "WORLD_SIZE": str(world_size or num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            RANK_STORE: store.to_json(),
        }
        with self._stack:
            for number in range(num_ranks):
                own = {**os.environ, **shared, "RANK": str(first_rank + number), "LOCAL_RANK": str(number)}
                self._processes.append(subprocess.Popen(command, env=own))
                self._stack.callback(self._processes[-1].wait)
                self._stack.callback(self._processes[-1].kill)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    @property
    def is_stopping(self) -> bool:
        return self._stop_deadline > 0.0

    def exit_code(self) -> int | None:
        """None while they run; 0 once all have succeeded; else the exit code of a rank that failed (128 + n for signal
        n): the others would wait for it. After `stop`: 0 if all succeeded, else 143.
        """
        codes = [process.poll() for process in self._processes]
        if self.is_stopping:
            return self._code_after_stop(codes)
        failed = next((code for code in codes if code), 0)
        if failed:
            log.error("rank %d ended with exit code %d", self._first_rank + codes.index(failed), failed)
            return failed if failed > 0 else 128 - failed
        return None if None in codes else 0

    def stop(self) -> None:
        """Sends SIGTERM. A rank that has not ended after a while counts as killed."""
        for process in self._processes:
            process.terminate()
        self._stop_deadline = time.monotonic() + _STOP_SECONDS

    def _code_after_stop(self, codes: Sequence[int | None]) -> int | None:
        if None not in codes:
            return STOPPED if any(codes) else 0
        if time.monotonic() < self._stop_deadline:
            return None
        log.error("the ranks did not end within %g s and are killed", _STOP_SECONDS)
        return STOPPED


def run_local_ranks(command: Sequence[str], num_ranks: int, *, stop: threading.Event | None = None) -> int:
    """Runs all ranks on this machine and returns their exit code, see `LocalRanks`. `stop` stops them.

    They meet in a file that only this user can write, so no port is open. It is not in the run folder, where another
    trainer may run that is to be taken over.
    """
    with ExitStack() as stack:
        store = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-ranks-"))) / "store"
        ranks = stack.enter_context(LocalRanks(command, file_store(str(store), num_ranks), num_ranks))
        while (code := ranks.exit_code()) is None:
            if stop is not None and stop.is_set() and not ranks.is_stopping:
                ranks.stop()
            time.sleep(_POLL_SECONDS)
    return code
