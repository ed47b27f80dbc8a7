"""The pool of scoring processes: a hang or a crash costs one item, nothing outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from protos.contracts import Score, Scored, ScoreItem, Unscored
from protos.errors import ScorerError
from reward.config import RewardConfig
from reward.pool import ScorerPool
from reward.registry import build_scorer

TROUBLE = r"""
import os, re, signal, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    match solution_str:
        case "hang":
            time.sleep(600)
        case "spin":  # holds the interpreter's lock for ever
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "exit":
            print("no way on", file=sys.stderr, flush=True)
            os._exit(3)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "print":
            print("spoken by the scorer")
        case "flood":
            for _ in range(20000):
                print("a line that is quite long, " * 4)
        case "pid":
            return os.getpid()
        case "child":
            return subprocess.Popen(["sleep", "600"]).pid
        case "babble":
            while True:
                print("word " * 1000)
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def trouble(tmp_path: Path) -> str:
    file = tmp_path / "trouble.py"
    file.write_text(TROUBLE)
    return f"{file}:compute_score"


@pytest.fixture
def make_pool(trouble: str) -> Iterator[Callable[..., ScorerPool]]:
    pools: list[ScorerPool] = []

    def make(num_workers: int = 1, timeout_seconds: float = 20.0) -> ScorerPool:
        pools.append(ScorerPool(trouble, {}, num_workers=num_workers, timeout_seconds=timeout_seconds))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def items(*solutions: str) -> list[ScoreItem]:
    return [ScoreItem("test", solution, "1") for solution in solutions]


def reason(score: Score) -> str:
    assert isinstance(score, Unscored), score
    return score.reason


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    """Until every thread has ended: a killed process is a zombie by name before the last of them is."""
    deadline = time.monotonic() + seconds
    threads = Path(f"/proc/{pid}/task")
    while psutil.pid_exists(pid) and not (
        psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and len(list(threads.iterdir())) <= 1
    ):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.02)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_trouble_costs_exactly_its_item(make_pool: Callable[..., ScorerPool], num_workers: int) -> None:
    pool = make_pool(num_workers, timeout_seconds=1.0)
    scores = pool.score(items("1", "hang", "0", "exit", "segv", "1", "spin", "1"))
    assert scores[0] == scores[5] == scores[7] == Scored(1.0) and scores[2] == Scored(0.0)
    assert [reason(scores[place]) for place in (1, 3, 4, 6)] == ["timeout", "crashed", "crashed", "timeout"]
    assert scores[3] == Unscored("crashed", "the scoring process exited with code 3; it last wrote: no way on")
    assert scores[4] == Unscored("crashed", "the scoring process was killed by SIGSEGV")
    assert scores[1] == Unscored("timeout", "no answer within 1 s")


def test_a_hang_in_one_caller_does_not_hold_another(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool(2, timeout_seconds=4.0)
    pool.score(items("1", "1"))  # both processes run
    hanging = threading.Thread(target=pool.score, args=(items("hang"),))
    started = time.monotonic()
    hanging.start()
    time.sleep(0.1)
    assert pool.score(items("1", "0", "1")) == [Scored(1.0), Scored(0.0), Scored(1.0)]
    assert time.monotonic() - started < 3.0
    hanging.join(timeout=20.0)
    assert not hanging.is_alive()


def test_many_items_in_order(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool(2)
    expected = [n % 3 == 0 for n in range(1000)]
    scores = pool.score(items(*("1" if right else "0" for right in expected)))
    assert scores == [Scored(float(right)) for right in expected]
    assert pool.score([]) == []


def test_large_items_and_much_output_do_not_jam(
    make_pool: Callable[..., ScorerPool], capsys: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool()
    large = "x" * 3_000_000
    assert pool.score(items(large, "flood", "print", large, "1"))[-1] == Scored(1.0)
    pool.score(items("1"))
    assert "spoken by the scorer" in capsys.readouterr().err


def test_endless_output_is_a_hang(make_pool: Callable[..., ScorerPool], capsys: pytest.CaptureFixture[str]) -> None:
    pool = make_pool(timeout_seconds=0.5)
    assert [reason(score) for score in pool.score(items("babble"))] == ["timeout"]
    capsys.readouterr()


def test_an_item_that_is_not_json_is_unscored(make_pool: Callable[..., ScorerPool]) -> None:
    bad = ScoreItem("test", "1", "1", {"bytes": b"x"})
    scores = make_pool().score([*items("1"), bad, *items("0")])
    assert [scores[0], scores[2]] == [Scored(1.0), Scored(0.0)] and reason(scores[1]) == "invalid_input"


def test_a_process_that_died_idle_blames_no_item(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool()
    (score,) = pool.score(items("pid"))
    assert isinstance(score, Scored)
    os.kill(int(score.value), signal.SIGKILL)
    wait_until_gone(int(score.value))
    assert pool.score(items("1")) == [Scored(1.0)] and pool.replaced_workers == 1


def test_close_ends_what_hangs_and_everything_it_started(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool()
    worker, child = (int(score.value) for score in pool.score(items("pid", "child")) if isinstance(score, Scored))
    answers: list[Score] = []
    caller = threading.Thread(target=lambda: answers.extend(pool.score(items("1", "hang", "1"))))
    caller.start()
    time.sleep(0.3)
    started = time.monotonic()
    pool.close()
    caller.join(timeout=10.0)
    assert time.monotonic() - started < 3.0
    assert answers == [Scored(1.0), *[Unscored("infrastructure", "the scorer is closing")] * 2]
    wait_until_gone(worker)
    wait_until_gone(child)
    assert [reason(score) for score in pool.score(items("1"))] == ["infrastructure"]


def test_workers_die_with_their_parent_even_while_they_spin(trouble: str) -> None:
    code = (
        "import sys, threading, time\n"
        "from reward.pool import ScorerPool\n"
        "from protos.contracts import ScoreItem\n"
        f"pool = ScorerPool({trouble!r}, {{}}, num_workers=1, timeout_seconds=60)\n"
        "print(int(pool.score([ScoreItem('', 'pid', '')])[0].value), flush=True)\n"
        "pool.score([ScoreItem('', 'spin', '')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    try:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        assert psutil.pid_exists(worker)
    finally:
        parent.kill()
        parent.wait(timeout=10.0)
        parent.stdout.close()
    wait_until_gone(worker)


def test_a_pattern_that_never_ends_is_a_timeout() -> None:
    config = RewardConfig(scorer="regex", arguments={"pattern": "(a+)+$"}, timeout_seconds=0.5)
    scorer = build_scorer(config)
    try:
        scores = scorer.score([ScoreItem("", "a" * 60 + "b", "a"), ScoreItem("", "baa", "aa")])
        assert [reason(scores[0]), scores[1]] == ["timeout", Scored(1.0)]
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import os\nos._exit(7)\n", "the process that imports it exited with code 7"),
        ("import time\ntime.sleep(600)\n", "it did not import within 0.7 s"),
        ("raise SystemExit(0)\n", "does not import: SystemExit"),
    ],
)
def test_a_module_that_takes_the_process_down(tmp_path: Path, source: str, told: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ScorerError) as caught:
        ScorerPool(f"{tmp_path}/bad.py:f", {}, num_workers=1, timeout_seconds=1.0, startup_seconds=0.7)
    assert told in str(caught.value)


def test_a_file_named_like_a_module_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(**everything):\n    return 0.75\n")
    monkeypatch.chdir(tmp_path)
    pool = ScorerPool("reward.py:compute_score", {}, num_workers=1, timeout_seconds=5.0)
    try:
        assert pool.score(items("1")) == [Scored(0.75)]
    finally:
        pool.close()


def test_a_worker_imports_no_grpc_redis_or_torch() -> None:
    code = "import sys, reward.worker\nprint(*({'grpc', 'redis', 'torch', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert done.stdout.strip() == ""
