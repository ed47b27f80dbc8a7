"""`tandem serve trainer`: runs this process as the only rank, starts all ranks of this machine, or joins torchrun's
rendezvous if the trainer uses several machines.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tandem.services.config import Recipe
from tandem.services.process import stop_event
from tandem.trainer.backend.registry import STORE_FILE

log = logging.getLogger(__name__)

RESTARTS_ACROSS_MACHINES = 5
_POLL_SECONDS = 0.05
_STOP_SECONDS = 30.0  # for ranks that were told to stop; the supervisor kills earlier


def run_trainer(recipe: Recipe, redis_url: str, recipe_arguments: Sequence[str]) -> None:
    """Runs the only rank or a rank that was started by this function in this process; otherwise starts the ranks.

    `recipe_arguments` are passed on to the ranks: the recipe's file and overrides.
    """
    if "RANK" not in os.environ and recipe.trainer.num_ranks * recipe.trainer.num_nodes > 1:
        os.environ.update(
            TANDEM_REDIS_URL=redis_url,
            TANDEM_PARENT_PID=str(os.getpid()),  # the ranks exit with this process
        )
        if recipe.trainer.num_nodes > 1:
            join_rendezvous(recipe, recipe_arguments)
            return
        command = [sys.executable, "-m", "tandem.services.cli", "serve", "trainer", *recipe_arguments]
        sys.exit(run_local_ranks(command, recipe.trainer.num_ranks, recipe.folder, stop=stop_event()))
    from tandem.services.trainer.service import main

    main(recipe, redis_url)


def run_local_ranks(
    command: Sequence[str], num_ranks: int, folder: Path, *, stop: threading.Event | None = None
) -> int:
    """Runs `command` once for each rank. Returns 0, or the exit code of the first rank that failed (128 + n for signal
    n), after it killed the others, which would wait for that rank. `stop` sends SIGTERM to all ranks.

    The ranks meet in a file in `folder` that only this user can write, so no port is open.
    """
    store = folder / "ranks.store"
    store.unlink(missing_ok=True)  # of killed ranks
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE_FILE: str(store.absolute()),
    }
    with ExitStack() as stack:
        stack.callback(store.unlink, missing_ok=True)
        ranks = []
        for rank in range(num_ranks):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=environment))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        stop = stop or threading.Event()
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            if stop.wait(_POLL_SECONDS):
                return _stopped(ranks)
    failed = next((code for code in codes if code), 0)
    if failed:
        log.error("rank %d ended with exit code %d", codes.index(failed), failed)
    return failed if failed >= 0 else 128 - failed


def _stopped(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Ends the ranks by SIGTERM, or by SIGKILL after a while. Returns 0 if all ended by themselves, else 143."""
    for process in ranks:
        process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
    except subprocess.TimeoutExpired:
        log.error("the ranks did not end within %g s and are killed", _STOP_SECONDS)
        return 128 + signal.SIGTERM
    return 128 + signal.SIGTERM if any(codes) else 0


def torchrun_arguments(recipe: Recipe, recipe_arguments: Sequence[str]) -> list[str]:
    """Arguments of torchrun on one of several machines. Only torchrun can restart the ranks of all machines together,
    so it does, not the supervisor.
    """
    return [
        *("--nnodes", str(recipe.trainer.num_nodes)),
        *("--nproc-per-node", str(recipe.trainer.num_ranks)),
        *("--max-restarts", str(RESTARTS_ACROSS_MACHINES)),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", recipe.trainer.rendezvous),
        *("--rdzv-id", recipe.run.run_id),
        *("--log-dir", os.devnull),  # else torchrun creates log folders in /tmp that it does not use
        *("--module", "tandem.services.cli", "serve", "trainer", *recipe_arguments),
    ]


def join_rendezvous(recipe: Recipe, recipe_arguments: Sequence[str]) -> None:
    """Runs torchrun's agent and exits with the code of the rank that failed first, which keeps a user error a user
    error.
    """
    # With a store shared with the rendezvous, restarted ranks would read their predecessors' addresses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(torchrun.parse_args(torchrun_arguments(recipe, recipe_arguments)))
    except ChildFailedError as error:
        _rank, failure = error.get_first_failure()
        log.error("a rank ended with exit code %d", failure.exitcode)
        sys.exit(2 if failure.exitcode == 2 else 1)
    except SignalException as stopped:  # its ranks have already exited
        sys.exit(128 + stopped.sigval)
