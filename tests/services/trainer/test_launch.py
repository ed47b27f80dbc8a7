"""The ranks of one machine: how they meet, end and stop."""

from __future__ import annotations

import ast
import signal
import sys
import threading
from pathlib import Path

import pytest

from tandem.services.trainer.launch import run_local_ranks
from tests.support.waiting import eventually

RANK = """
import os, psutil, sys, torch
from torch import distributed
from tandem.trainer.backend.process_group import join_process_group

join_process_group(60.0)
rank = torch.tensor([float(os.environ["RANK"]) + 1])
distributed.all_reduce(rank)
listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(repr((rank.item(), listening)))
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_meet_without_a_port_that_another_host_could_reach(tmp_path: Path, num_ranks: int) -> None:
    assert run_local_ranks([sys.executable, "-c", RANK, str(tmp_path)], num_ranks, tmp_path) == 0
    for rank in range(num_ranks):
        total, listening = ast.literal_eval((tmp_path / str(rank)).read_text())
        assert total == sum(range(1, num_ranks + 1))
        assert set(listening) <= {"127.0.0.1"}
    assert not list(tmp_path.glob("*store*"))


def test_the_exit_code_is_that_of_the_first_rank_that_failed(tmp_path: Path) -> None:
    rank = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(2); time.sleep(100)"
    assert run_local_ranks([sys.executable, "-c", rank], 3, tmp_path) == 2


def test_a_killed_rank_fails_all(tmp_path: Path) -> None:
    rank = (
        "import os, signal, time; os.environ['RANK'] == '0' and os.kill(os.getpid(), signal.SIGKILL); time.sleep(100)"
    )
    assert run_local_ranks([sys.executable, "-c", rank], 2, tmp_path) == 128 + signal.SIGKILL


def test_stopping_lets_the_ranks_end_by_themselves(tmp_path: Path) -> None:
    rank = (
        "import os, signal, sys, time, pathlib\n"
        "def stopped(*_):\n"
        "    pathlib.Path(sys.argv[1], 'stopped' + os.environ['RANK']).touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stopped)\n"
        "pathlib.Path(sys.argv[1], 'ready' + os.environ['RANK']).touch()\n"
        "time.sleep(100)\n"
    )
    stop = threading.Event()
    codes: list[int] = []
    command = [sys.executable, "-c", rank, str(tmp_path)]
    ranks = threading.Thread(target=lambda: codes.append(run_local_ranks(command, 2, tmp_path, stop=stop)))
    ranks.start()
    eventually(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    stop.set()
    ranks.join(60)
    assert codes == [0]
    assert len(list(tmp_path.glob("stopped*"))) == 2
