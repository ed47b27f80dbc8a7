"""`tandem serve trainer`: runs this process as the only rank, or as torchrun's agent for several ranks and machines."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from tandem.services.config import Recipe

log = logging.getLogger(__name__)

RESTARTS_ACROSS_MACHINES = 5


def run_trainer(recipe: Recipe, redis_url: str, recipe_arguments: Sequence[str]) -> None:
    """Runs this rank if torchrun started this process. Otherwise runs the single rank here, or starts all of this
    machine's ranks through torchrun.

    `recipe_arguments` are passed on to the ranks: the recipe's file and overrides.
    """
    if "RANK" not in os.environ:
        if recipe.trainer.num_ranks * recipe.trainer.num_nodes > 1:
            run_ranks(recipe, redis_url, recipe_arguments)
            return
        os.environ.update(single_rank_environment())
    from tandem.services.trainer.service import main

    main(recipe, redis_url)


def single_rank_environment() -> Mapping[str, str]:
    """The variables that torchrun sets for a world of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def torchrun_arguments(recipe: Recipe, recipe_arguments: Sequence[str]) -> list[str]:
    """Arguments of torchrun on this machine. On one machine the supervisor restarts the whole trainer. Across machines
    only torchrun can restart all ranks together, so it does.
    """
    trainer = recipe.trainer
    several = trainer.num_nodes > 1
    return [
        "--nnodes",
        str(trainer.num_nodes),
        "--nproc-per-node",
        str(trainer.num_ranks),
        "--max-restarts",
        str(RESTARTS_ACROSS_MACHINES if several else 0),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        trainer.rendezvous if several else "127.0.0.1:0",
        "--rdzv-id",
        recipe.run.run_id,
        "--log-dir",
        os.devnull,  # else torchrun creates log folders in /tmp that it does not use
        "--module",
        "tandem.services.cli",
        "serve",
        "trainer",
        *recipe_arguments,
    ]


def run_ranks(recipe: Recipe, redis_url: str, recipe_arguments: Sequence[str]) -> None:
    """Runs torchrun's agent and exits with the code of the rank that failed first, which keeps a user error a user
    error.
    """
    os.environ.update(
        TANDEM_REDIS_URL=redis_url,
        TANDEM_PARENT_PID=str(os.getpid()),  # the ranks exit with this agent
        # With a store shared with the rendezvous, restarted ranks would read their predecessors' addresses.
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )

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
