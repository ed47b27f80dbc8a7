"""`tandem serve trainer`: runs this process as the only rank, or starts this machine's ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing

import psutil

from tandem.services.buffer.store_source import redis_store
from tandem.services.config import Recipe
from tandem.services.logging_setup import configure_logging
from tandem.services.process import starting, stop_event
from tandem.services.run.endpoint import run_buffer
from tandem.services.trainer.nodes import Node
from tandem.services.trainer.ranks import LocalRanks, run_local_ranks
from tandem.services.trainer.recovery import check_no_trainer_works
from tandem.services.trainer.takeover import TAKEOVER_VARIABLE


def run_trainer(recipe: Recipe, redis_url: str, recipe_arguments: Sequence[str]) -> None:
    """Runs the only rank or a rank that was started by this function in this process; otherwise starts the ranks.

    `recipe_arguments` are passed on to the ranks: the recipe's file and overrides.
    """
    on_one_machine = recipe.trainer.num_nodes == 1  # else another machine may hold the lock for all
    if "RANK" not in os.environ and on_one_machine and os.environ.get(TAKEOVER_VARIABLE) != "1":
        check_no_trainer_works(recipe, redis_url)
    if "RANK" not in os.environ and recipe.trainer.num_ranks * recipe.trainer.num_nodes > 1:
        os.environ.update(
            TANDEM_REDIS_URL=redis_url,
            TANDEM_PARENT_PID=str(os.getpid()),  # the ranks exit with this process
        )
        command = [sys.executable, "-m", "tandem.services.cli", "serve", "trainer", *recipe_arguments]
        if recipe.trainer.num_nodes > 1:
            sys.exit(run_node(command, recipe, redis_url))
        sys.exit(run_local_ranks(command, recipe.trainer.num_ranks, stop=stop_event()))
    with starting():
        from tandem.services.trainer.service import main

    main(recipe, redis_url)


def run_node(command: Sequence[str], recipe: Recipe, redis_url: str) -> int:
    """Runs this machine's part of a trainer on several machines; returns the exit code, see `Node.run`.

    The ranks connect over the network interface that has the address `run.host`.
    """
    configure_logging("trainer", run=recipe.run.run_id)
    num_ranks, num_nodes, run_id = recipe.trainer.num_ranks, recipe.trainer.num_nodes, recipe.run.run_id
    interface = _interface_of(recipe.run.host)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    environment = {name: os.environ.get(name, interface) for name in names}

    def start_ranks(seat: int, generation: int) -> LocalRanks:
        return LocalRanks(
            command,
            redis_store(redis_url, run_id, f"ranks-{generation}"),
            num_ranks,
            first_rank=seat * num_ranks,
            world_size=num_nodes * num_ranks,
            environment=environment,
        )

    stop = stop_event()
    with closing(run_buffer(recipe, redis_url, stop)) as buffer:
        return Node(buffer.connection, num_nodes, start_ranks).run(stop)


def _interface_of(host: str) -> str:
    """The network interface of this machine that has this address; "" if none has, as with 0.0.0.0."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address in found for address in addresses):
            return name
    return ""
