"""A launcher of worker processes that dies, stops or hangs is replaced. No item is scored 0 or blamed for it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tandem.protos.contracts import Scored, Unscored
from tandem.reward.registry import ScorerSpec
from tandem.reward.workers import launcher_process, worker_process
from tandem.reward.workers.child_process import ChildProcess, is_stopped
from tandem.reward.workers.launcher_process import Launchers
from tests.support.pool_trouble import ONE, Make, items, value
from tests.support.processes import wait_until_gone
from tests.support.waiting import eventually


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


@pytest.mark.parametrize(("text", "reason"), [("exit", "crashed"), ("hang", "timeout")])
def test_a_stopped_launcher_is_replaced(make_pool: Make, spec: ScorerSpec, text: str, reason: str) -> None:
    pool = make_pool(timeout_seconds=0.5)
    launcher = psutil.Process(value(pool.score(spec, items("pid"))[0])).ppid()
    os.kill(launcher, signal.SIGSTOP)
    first, failed, last = pool.score(spec, items("1", text, "1"))
    assert first == last == ONE
    assert isinstance(failed, Unscored) and failed.reason == reason
    assert psutil.Process(value(pool.score(spec, items("pid"))[0])).ppid() != launcher
    wait_until_gone(launcher)


def test_a_stopped_launcher_is_replaced_at_the_first_request(launchers: Launchers) -> None:
    first = launchers.spawn(())
    stopped = psutil.Process(first.pid).ppid()
    os.kill(stopped, signal.SIGSTOP)
    second = launchers.spawn(())
    assert psutil.Process(second.pid).ppid() != stopped
    for worker in (first, second):
        worker.close()


def test_an_item_that_stops_its_launcher_costs_no_other_item_and_leaves_nothing(
    make_pool: Make, spec: ScorerSpec
) -> None:
    """What the launcher's workers started ends when it is replaced."""
    pool = make_pool()
    child = value(pool.score(spec, items("child"))[0])
    assert pool.score(spec, items("1", "stop the launcher", "1")) == [ONE, Scored(0.0), ONE]
    assert pool.score(spec, items("exit", "1", "1"))[1:] == [ONE, ONE]
    wait_until_gone(child)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_items_of_other_workers_are_infrastructure_when_their_launcher_ends(
    make_pool: Make, spec: ScorerSpec, tmp_path: Path, how: signal.Signals
) -> None:
    """A worker ends with the launcher that forked it, through no fault of the item."""
    pool = make_pool(num_workers=2)
    launcher = psutil.Process(value(pool.score(spec, items("pid"))[0])).ppid()
    under_way = pool.submit(spec, items(f"wait: {tmp_path / 'begun'}"), "calls")
    eventually((tmp_path / "begun").exists)
    os.kill(launcher, how)
    assert pool.score(spec, items("exit", "1"))[1] == ONE
    (score,) = under_way.wait()
    assert isinstance(score, Unscored) and score.reason == "infrastructure" and "launcher" in score.detail, score


def test_an_item_that_kills_its_launcher_is_unscored_and_the_next_are_not(make_pool: Make, spec: ScorerSpec) -> None:
    first, killer, last = make_pool().score(spec, items("1", "kill the launcher", "1"))
    assert first == last == ONE
    assert isinstance(killer, Unscored) and killer.reason == "infrastructure", killer


def test_a_launcher_that_gives_no_worker_twice_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launchers: Launchers
) -> None:
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
    with pytest.raises(OSError, match="gave no process"):
        launchers.spawn(("never_imported",))
    assert not ended
    with pytest.raises(OSError, match="gave no process"):
        launchers.spawn(("never_imported",))
    wait_until_gone(ended[0])
