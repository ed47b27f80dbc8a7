"""`tandem chaos` as a user runs it: stopped by each signal, and on a Redis that is not the run's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest
import redis

from tandem.protos.errors import EnvironmentLackError
from tandem.services.buffer.buffer import Buffer
from tandem.services.chaos.disk import check_mountable
from tests.support.paths import ROOT
from tests.support.redis_ring import running_redis
from tests.support.whole_run import WholeRun, processes_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]
SEED = 368  # a cut of the feed for 1.3 s, then a kill of the reward service
STOP_SECONDS = 40.0
"""Two waits of 15 s for the run, and 10 s for its disk."""


def small_run(folder: Path, total_batches: int) -> WholeRun:
    return WholeRun(
        folder,
        run={"run_id": "whole", "total_batches": total_batches, "groups_per_batch": 2, "staleness_budget": 2},
        rollout={"engine": "transformers", "samples_per_prompt": 4, "max_response_tokens": 16},
    )


def has_disk() -> bool:
    try:
        check_mountable()
    except EnvironmentLackError:
        return False
    return True


@contextmanager
def in_terminal(run: WholeRun, *options: object) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """`tandem chaos` with its run begun, and the file whose closing closes its terminal."""
    controller, terminal = os.openpty()
    command = [sys.executable, "-m", "tandem.services.cli", "chaos", str(run.recipe), *map(str, options)]
    environment = {**os.environ, "TANDEM_REDIS_URL": "", "HF_HUB_OFFLINE": "1"}
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may run under nohup
    try:
        process = subprocess.Popen(
            ["setsid", "--ctty", *command], cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
        )
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(terminal)
    try:
        with open(controller, "rb", buffering=0) as lines:
            said = b""
            while b"faults (" not in said:
                said += lines.read(4096)  # its end raises OSError
            yield process, lines
    finally:
        process.kill()
        process.wait(10)
        if os.path.ismount(run.folder):
            subprocess.run(["umount", "--lazy", str(run.folder)], check=True)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes_and_unmounts_the_run_folder(tmp_path: Path, number: signal.Signals) -> None:
    run, result = small_run(tmp_path, 1000), tmp_path / "chaos.json"
    kinds = "kill,disk" if has_disk() else "kill"
    with in_terminal(run, "--kinds", kinds, "--json", result) as (process, terminal):
        assert os.path.ismount(run.folder) == (kinds != "kill")
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 2, "Redis and the run"
        if number is signal.SIGHUP:
            terminal.close()
        else:
            process.send_signal(number)
            process.send_signal(number)  # an impatient user
        assert process.wait(STOP_SECONDS) == 130
    assert processes_of(run) == [] and psutil.wait_procs(below, timeout=1)[1] == []
    assert not os.path.ismount(run.folder) and not (tmp_path / "run.copy").exists()
    assert (run.folder / "logs" / "run.log").exists(), "what was on the disk is in the folder"
    assert json.loads(result.read_text())["interrupted"] is True


def test_an_external_redis_is_not_touched_by_faults(tmp_path: Path) -> None:
    run, result = small_run(tmp_path, 5), tmp_path / "chaos.json"
    with running_redis(tmp_path / "elsewhere") as url:
        server = redis.Redis.from_url(url, protocol=2)
        identity = server.info("server")["run_id"]
        options = ("--faults", 2, "--seed", SEED, "--kinds", "kill,cut", "--json", result)
        done = run.tandem("chaos", str(run.recipe), *map(str, options), deadline=100, TANDEM_REDIS_URL=url)
        assert done.returncode == 0, done.stdout + done.stderr + run.logs()
        assert server.info("server")["run_id"] == identity, "it is the same process"
        assert Buffer(url, "whole").counts()["committed"] == 10
    written = json.loads(result.read_text())
    assert written["faults_made"] == 2 and written["violations"] == []
    assert not (run.folder / "redis").exists(), "the run has no Redis of its own"
