"""The end of the pool of worker processes, by `close` or by death: no process outlives its owner, and no caller waits
for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tandem.protos.contracts import Scored, Unscored
from tandem.reward.registry import ScorerSpec
from tandem.reward.workers.child_process import _children_by_parent, children_of, count_descendants
from tests.support.paths import ROOT
from tests.support.pool_trouble import Make, items, reason, value
from tests.support.processes import wait_until_gone

pytest_plugins = ("tests.support.scorer_pools",)


def test_close_kills_hanging_workers_and_all_they_started(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    pids = [value(score) for score in pool.score(spec, items("pid", "child", "daemon"))]
    launcher = psutil.Process(pids[0]).ppid()
    request = pool.submit(spec, items("1", "hang", "1"), "calls")
    while request.missing > 2:
        time.sleep(0.01)
        if request.scores[0] is None and pool.figures()["worker_items_calls"] >= 3:
            break  # answers are stored per chunk
    time.sleep(0.2)
    pool.close()
    assert request.wait() == [Scored(1.0), *[Unscored("infrastructure", "the scorer is closing")] * 2]
    for pid in [*pids, launcher]:
        wait_until_gone(pid)
    assert [reason(score) for score in pool.score(spec, items("1"))] == ["infrastructure"]


@pytest.mark.parametrize("left", ["child", "daemon"])
def test_processes_left_by_an_item_end_with_its_worker(make_pool: Make, spec: ScorerSpec, left: str) -> None:
    pool = make_pool()
    child, _ = pool.score(spec, items(left, "exit"))
    wait_until_gone(value(child))


def test_a_daemon_is_killed_while_its_worker_lives(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    pid, daemon = (value(score) for score in pool.score(spec, items("pid", "daemon")))
    wait_until_gone(daemon)
    assert value(pool.score(spec, items("pid"))[0]) == pid


@pytest.mark.parametrize("doing", ["spin", "child", "daemon"])
def test_all_processes_end_when_the_service_is_killed(trouble: str, doing: str) -> None:
    code = (
        "from reward.config import RewardConfig\n"
        "from tandem.reward.workers.pool import ScorerPool\n"
        "from tandem.reward.registry import make_spec\n"
        "from tandem.protos.contracts import ScoreItem\n"
        f"pool, spec = ScorerPool(RewardConfig(timeout_seconds=60)), make_spec({trouble!r}, {{}})\n"
        "print(int(pool.score(spec, [ScoreItem('', 'pid', '')])[0].value), flush=True)\n"
        f"print(int(pool.score(spec, [ScoreItem('', {doing!r}, '')])[0].value), flush=True)\n"
        "pool.score(spec, [ScoreItem('', 'hang', '')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        pids.append(psutil.Process(pids[0]).ppid())
        if doing == "spin":
            time.sleep(0.3)
        else:
            pids.append(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait(timeout=10.0)
        parent.stdout.close()  # type: ignore[union-attr]
    for pid in pids:
        wait_until_gone(pid)


def test_a_bug_in_a_pool_thread_is_raised_to_the_callers(
    make_pool: Make, spec: ScorerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    monkeypatch.setattr(pool, "note_pace", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError) as caught:
        pool.score(spec, items("1"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_children_are_found_with_and_without_kernel_lists() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert child.pid in children_of(os.getpid()) and child.pid in _children_by_parent(os.getpid())
            assert count_descendants(os.getpid(), 100) >= 1
        finally:
            child.kill()
    assert children_of(child.pid) == []
