"""A launcher of trainer ranks, also as a process: `python -m tests.support.trainer_node FOLDER URL RUN_ID PROGRAM`."""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.protos.store_source import file_store
from tandem.services.buffer.connection import RUNS, Connection
from tandem.services.process import stop_event
from tandem.services.trainer.nodes import Node
from tandem.services.trainer.ranks import LocalRanks

NUM_NODES, NUM_RANKS = 2, 2


def make_node(folder: Path, url: str, run_id: str, program: str) -> Node:
    """One of two machines with two ranks each that run `program` in `folder`."""
    command = [sys.executable, "-c", program, str(folder)]

    def start_ranks(seat: int, generation: int) -> LocalRanks:
        store = file_store(str(folder / "store"), NUM_NODES * NUM_RANKS)
        return LocalRanks(command, store, NUM_RANKS, first_rank=NUM_RANKS * seat, world_size=NUM_NODES * NUM_RANKS)

    return Node(Connection(url, run_id, RUNS), NUM_NODES, start_ranks)


if __name__ == "__main__":
    folder, url, run_id, program = sys.argv[1:]
    sys.exit(make_node(Path(folder), url, run_id, program).run(stop_event()))
