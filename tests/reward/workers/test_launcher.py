"""A launcher of worker processes that dies, stops or hangs is replaced. No item is scored 0 or blamed for it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tandem.protos.contracts import Scored, ScoreItem, Unscored
from tandem.reward.config import RewardConfig
from tandem.reward.registry import ScorerSpec, make_spec
from tandem.reward.workers import launcher_process, worker_process
from tandem.reward.workers.child_process import ChildProcess, is_stopped
from tandem.reward.workers.launcher_process import Launchers
from tandem.reward.workers.pool import ScorerPool
from tests.support.pool_trouble import Make
from tests.support.processes import wait_until_gone

pytest_plugins = ("tests.support.scorer_pools",)

FUNCTION = """
import os, pathlib, signal, subprocess, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    what, _, place = solution_str.partition(": ")
    match what:
        case "pid":
            return os.getpid()
        case "wait":
            pathlib.Path(place).touch()
            time.sleep(600)
        case "child":
            return subprocess.Popen(["sleep", "600"]).pid
        case "crash":
            os._exit(4)
        case "hang":
            time.sleep(600)
        case "stop the launcher":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "kill the launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
    return 7.0
"""
SEVEN = Scored(7.0)


@pytest.fixture
def spec(tmp_path: Path) -> ScorerSpec:
    (tmp_path / "function.py").write_text(FUNCTION)
    return make_spec(f"{tmp_path}/function.py:compute_score", {})


def items(*solutions: str) -> list[ScoreItem]:
    return [ScoreItem("test", solution, None) for solution in solutions]


def process_id(pool: ScorerPool, spec: ScorerSpec, what: str = "pid") -> int:
    (score,) = pool.score(spec, items(what))
    assert isinstance(score, Scored), score
    return int(score.value)


def test_is_stopped_distinguishes_stopped_from_sleeping() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert is_stopped(process.pid)
        finally:
            process.kill()
    assert not is_stopped(process.pid)


@pytest.mark.parametrize(("text", "reason"), [("crash", "crashed"), ("hang", "timeout")])
def test_a_stopped_launcher_is_replaced(make_pool: Make, spec: ScorerSpec, text: str, reason: str) -> None:
    pool = make_pool(timeout_seconds=0.5)
    launcher = psutil.Process(process_id(pool, spec)).ppid()
    os.kill(launcher, signal.SIGSTOP)
    first, failed, last = pool.score(spec, items("a", text, "b"))
    assert first == last == SEVEN
    assert isinstance(failed, Unscored) and failed.reason == reason
    assert psutil.Process(process_id(pool, spec)).ppid() != launcher
    wait_until_gone(launcher)


def test_a_stopped_launcher_is_replaced_at_the_first_request() -> None:
    launchers = Launchers(RewardConfig(), 60.0)
    try:
        first = launchers.spawn(())
        stopped = psutil.Process(first.pid).ppid()
        os.kill(stopped, signal.SIGSTOP)
        second = launchers.spawn(())
        assert psutil.Process(second.pid).ppid() != stopped
        for worker in (first, second):
            worker.close()
    finally:
        launchers.close()


def test_an_item_that_stops_its_launcher_costs_no_other_item_its_score(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    assert pool.score(spec, items("a", "stop the launcher", "b")) == [SEVEN] * 3
    scores = pool.score(spec, items("crash", "a", "b"))
    assert scores[1:] == [SEVEN, SEVEN]


def test_replacing_a_stopped_launcher_ends_what_its_workers_started(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    child = process_id(pool, spec, "child")
    pool.score(spec, items("stop the launcher", "crash", "a"))
    wait_until_gone(child)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_items_of_other_workers_are_infrastructure_when_their_launcher_ends(
    make_pool: Make, spec: ScorerSpec, tmp_path: Path, how: signal.Signals
) -> None:
    """A worker ends with the launcher that forked it, through no fault of the item."""
    pool = make_pool(num_workers=2)
    launcher = psutil.Process(process_id(pool, spec)).ppid()
    under_way = pool.submit(spec, items(f"wait: {tmp_path / 'begun'}"), "calls")
    deadline = time.monotonic() + 30.0
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(launcher, how)
    assert pool.score(spec, items("crash", "a"))[1] == SEVEN
    (score,) = under_way.wait()
    assert isinstance(score, Unscored) and score.reason == "infrastructure" and "launcher" in score.detail, score


def test_an_item_that_kills_its_launcher_is_unscored_and_the_next_are_not(make_pool: Make, spec: ScorerSpec) -> None:
    first, killer, last = make_pool().score(spec, items("a", "kill the launcher", "b"))
    assert first == last == SEVEN
    assert isinstance(killer, Unscored) and killer.reason == "infrastructure", killer


def test_a_launcher_that_gives_no_worker_twice_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a single failure the launcher may only be slow, and a replacement would have to repeat its imports."""
    (tmp_path / "never_imported.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(worker_process, "LAUNCH_SECONDS", 0.2)
    ended: list[int] = []
    close = ChildProcess.close
    monkeypatch.setattr(launcher_process, "_END_SECONDS", 0.2)
    monkeypatch.setattr(
        ChildProcess, "close", lambda self, **options: (ended.append(self.pid), close(self, **options))[1]
    )
    launchers = Launchers(RewardConfig(), 60.0)
    try:
        with pytest.raises(OSError, match="gave no process"):
            launchers.spawn(("never_imported",))
        assert not ended
        with pytest.raises(OSError, match="gave no process"):
            launchers.spawn(("never_imported",))
        wait_until_gone(ended[0])
    finally:
        launchers.close()
