"""The pool of worker processes: a hang, a crash or an exceeded limit costs one item, and no process outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.registry import ScorerSpec, make_spec
from tandem.reward.scheduling.priority_queue import PRIORITIES, SHARE, Priority, PriorityQueue
from tandem.reward.workers import requests
from tandem.reward.workers.child_process import children_of, count_descendants
from tandem.reward.workers.pool import ScorerPool
from tests.reward.workers.conftest import Make, items, reason, value
from tests.support.paths import ROOT
from tests.support.processes import run_python, wait_until_gone
from tests.support.waiting import eventually

# ---- failures ----


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_hang_or_crash_costs_only_its_item(make_pool: Make, spec: ScorerSpec, num_workers: int) -> None:
    pool = make_pool(num_workers, timeout_seconds=1.0)
    scores = pool.score(spec, items("1", "hang", "0", "exit", "segv", "1", "spin", "1"))
    assert scores[0] == scores[5] == scores[7] == Scored(1.0) and scores[2] == Scored(0.0)
    assert scores[1] == scores[6] == Unscored("timeout", "no answer within 1 s")
    assert scores[3] == Unscored("crashed", "the scoring process exited with code 3; it last wrote: no way on")
    assert scores[4] == Unscored("crashed", "the scoring process was killed by SIGSEGV")


def test_a_hang_of_one_caller_does_not_delay_another(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool(2, timeout_seconds=60.0)
    hanging = pool.submit(spec, items("hang"), "calls")
    assert pool.score(spec, items("1", "0", "1")) == [Scored(1.0), Scored(0.0), Scored(1.0)]
    assert hanging.missing == 1
    pool.close()
    assert [reason(score) for score in hanging.wait()] == ["infrastructure"]


def test_many_items_and_threads_get_their_scores_in_order(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool(2)
    expected = [n % 3 == 0 for n in range(3000)]
    scores = pool.score(spec, items(*("1" if right else "0" for right in expected)))
    assert scores == [Scored(float(right)) for right in expected]
    assert pool.score(spec, []) == []
    assert pool.figures()["worker_items_calls"] == 3000

    def call(number: int) -> list[Score]:
        texts = ["1" if n % number else "0" for n in range(50)]
        return pool.score(spec, items(*texts), PRIORITIES[number % 3])

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(call, range(1, 9), timeout=60.0))
    assert found == [[Scored(float(bool(n % k))) for n in range(50)] for k in range(1, 9)]


def test_large_items_and_much_output_do_not_deadlock(
    pool: ScorerPool, spec: ScorerSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    large = "x" * 3_000_000
    assert pool.score(spec, items(large, "chat", "print", large, "1"))[-1] == Scored(1.0)
    pool.score(spec, items("1"))
    assert "spoken by the scorer" in capsys.readouterr().err


def test_exceeding_a_limit_is_unscored_as_limit(
    make_pool: Make, spec: ScorerSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    small, short = make_pool(output_bytes=1 << 16, processes=10, open_files=64), make_pool(cpu_seconds=0.2)
    for pool, text, told in (
        (small, "memory", "more than 4294967296 bytes of memory"),
        (small, "babble", "it printed more than 65536 bytes"),
        (small, "children", "more than 10 processes at a time"),
        (small, "bomb", "more than 10 processes at a time"),
        (small, "files", "Too many open files"),
        (small, "large", "an answer of more than 1048576 bytes"),
        (short, "burn", "more than 0.2 s of processor time"),
    ):
        before, broken, after = pool.score(spec, items("1", text, "0"))
        assert (before, after) == (Scored(1.0), Scored(0.0))
        assert isinstance(broken, Unscored) and broken.reason == "limit" and told in broken.detail, text
    capsys.readouterr()


def test_the_output_limit_is_per_item(make_pool: Make, spec: ScorerSpec, capsys: pytest.CaptureFixture[str]) -> None:
    """`chat` prints about 570 kB: two items together exceed the limit, and each alone does not."""
    pool = make_pool(output_bytes=800_000)
    assert pool.score(spec, items(*["chat"] * 4)) == [Scored(0.0)] * 4
    capsys.readouterr()


def test_memory_leaked_by_earlier_items_costs_no_later_item(make_pool: Make, spec: ScorerSpec) -> None:
    """Each item leaks 16 MB of 256. The worker is replaced in time, or the item that fails is scored again in a fresh
    one.
    """
    pool = make_pool(memory_bytes=256 << 20)
    assert pool.score(spec, items(*["leak"] * 36)) == [Scored(0.0)] * 36
    assert pool.replaced_workers >= 2


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (ScoreItem("test", "1", "1", {"bytes": b"x"}), "not JSON"),
        (ScoreItem("test", "1", {1: {2, 3}}), "not JSON"),
        (ScoreItem("test", "1", "x" * 3000), "takes 30"),
    ],
)
def test_an_item_that_cannot_be_encoded_is_unscored(
    pool: ScorerPool, spec: ScorerSpec, monkeypatch: pytest.MonkeyPatch, item: ScoreItem, told: str
) -> None:
    monkeypatch.setattr(requests, "MAX_ITEM_BYTES", 2000)
    scores = pool.score(spec, [*items("1"), item, *items("0")])
    assert [scores[0], scores[2]] == [Scored(1.0), Scored(0.0)]
    assert reason(scores[1]) == "invalid_input" and told in scores[1].detail  # type: ignore[union-attr]


def test_deeply_nested_and_odd_items_are_scored(pool: ScorerPool, spec: ScorerSpec) -> None:
    def nested(depth: int) -> list[Any]:
        return reduce(lambda inner, _: [inner], range(depth), [])

    odd = [ScoreItem("test", "1", nested(depth)) for depth in (2000, 900)]
    scores = pool.score(spec, [*odd, ScoreItem("test", "\ud800\0", "1"), *items("1")])
    assert reason(scores[0]) == "invalid_input" and scores[3] == Scored(1.0)
    assert scores[1] == Scored(0.0) or reason(scores[1]) == "invalid_input"


def test_a_process_or_launcher_that_died_while_idle_costs_no_item(pool: ScorerPool, spec: ScorerSpec) -> None:
    first, replaced = value(pool.score(spec, items("pid"))[0]), pool.replaced_workers
    launcher = psutil.Process(first).ppid()
    os.kill(first, signal.SIGKILL)
    wait_until_gone(first)
    assert pool.score(spec, items("1")) == [Scored(1.0)] and pool.replaced_workers == replaced + 1
    second = value(pool.score(spec, items("pid"))[0])
    os.kill(launcher, signal.SIGKILL)
    wait_until_gone(second)
    assert psutil.Process(value(pool.score(spec, items("pid"))[0])).ppid() != launcher


# ---- priorities ----


@given(st.sets(st.sampled_from(PRIORITIES), min_size=1), st.integers(1, 400))
def test_the_priority_queue_gives_every_priority_its_share(busy: set[Priority], turns: int) -> None:
    priorities: PriorityQueue[str] = PriorityQueue()
    for priority in busy:
        priorities.add(priority, "a caller that always has another item")
    served: list[Priority] = []
    for _ in range(turns):
        found = priorities.pop()
        assert found is not None
        served.append(found[0])
        priorities.add(*found)
    counts, order = Counter(served), [priority for priority in PRIORITIES if priority in busy]
    left = turns
    for priority in order[:-1]:  # with lower priorities waiting, a priority gives one of SHARE turns to them
        assert counts[priority] == left - left // SHARE
        left //= SHARE
    assert counts[order[-1]] == left
    waits = SHARE ** (len(order) - 1)
    assert all(set(served[start : start + waits]) == busy for start in range(0, turns - waits + 1, waits))


def test_the_ring_passes_a_job_in_the_pool_without_starving_it(pool: ScorerPool, tmp_path: Path) -> None:
    """With one worker that records the order: groups overtake an earlier job without stopping it."""
    (tmp_path / "note.py").write_text(
        "import time\n\ndef f(solution_str, extra_info, **item):\n"
        f"    open({str(tmp_path / 'order')!r}, 'a').write(solution_str)\n    time.sleep(0.02)\n    return 1.0\n"
    )
    spec = make_spec(f"{tmp_path}/note.py:f", {})
    pool.load(spec)
    job = pool.submit(spec, items(*["j"] * 200), "jobs")
    eventually((tmp_path / "order").exists)
    ring = pool.submit(spec, items(*["r"] * 40), "ring")
    ring.wait()
    order = (tmp_path / "order").read_text()
    assert job.missing > 100, "the ring did not wait for the job"
    during = order[order.index("r") : order.rindex("r")]
    assert 0 < during.count("j") <= during.count("r"), "the job was not starved meanwhile, nor did it get most"
    pool.withdraw(job)


# ---- concurrency ----


def test_a_worker_imports_no_grpc_redis_numpy_or_torch() -> None:
    code = (
        "import sys, tandem.reward.workers.launcher\n"
        "heavy = {'grpc', 'redis', 'torch', 'numpy', 'pyarrow', 'sympy', 'transformers', 'httpx', 'jsonschema'}\n"
        "print(*(heavy & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@settings(max_examples=30)
@given(
    st.lists(st.text(max_size=20), max_size=5),
    st.recursive(st.none() | st.floats() | st.text(), st.lists, max_leaves=10),
)
def test_items_arrive_unchanged(texts: list[str], truth: Any) -> None:
    from tandem.reward.workers.worker import _decoded

    for text in texts:
        item = ScoreItem(text, text[::-1], truth, {text: truth}, text)
        line = requests.encode(item)
        assert isinstance(line, bytes)
        assert repr(_decoded(line)) == repr(item)


def test_close_kills_hanging_workers_and_all_they_started(make_pool: Make, spec: ScorerSpec, tmp_path: Path) -> None:
    pool = make_pool()
    pids = [value(score) for score in pool.score(spec, items("pid", "child", "daemon"))]
    launcher = psutil.Process(pids[0]).ppid()
    begun = tmp_path / "begun"
    request = pool.submit(spec, items("1", f"wait: {begun}", "1"), "calls")
    eventually(lambda: begun.exists() and (request.missing == 2 or any(a for _, a in list(request.at_work.values()))))
    pool.close()
    assert request.wait() == [Scored(1.0), *[Unscored("infrastructure", "the scorer is closing")] * 2]
    for pid in [*pids, launcher]:
        wait_until_gone(pid)
    assert [reason(score) for score in pool.score(spec, items("1"))] == ["infrastructure"]


@pytest.mark.parametrize("left", ["child", "daemon"])
def test_processes_left_by_an_item_end_with_its_worker(pool: ScorerPool, spec: ScorerSpec, left: str) -> None:
    child, _ = pool.score(spec, items(left, "exit"))
    wait_until_gone(value(child))


def test_a_daemon_is_killed_while_its_worker_lives(pool: ScorerPool, spec: ScorerSpec) -> None:
    pid, daemon = (value(score) for score in pool.score(spec, items("pid", "daemon")))
    wait_until_gone(daemon)
    assert value(pool.score(spec, items("pid"))[0]) == pid


def test_all_processes_end_when_the_service_is_killed(trouble: str) -> None:
    code = (
        "from tandem.reward.config import RewardConfig\n"
        "from tandem.reward.workers.pool import ScorerPool\n"
        "from tandem.reward.registry import make_spec\n"
        "from tandem.protos.contracts import ScoreItem\n"
        f"pool, spec = ScorerPool(RewardConfig(timeout_seconds=60)), make_spec({trouble!r}, {{}})\n"
        "for what in ('pid', 'child', 'daemon'):\n"
        "    print(int(pool.score(spec, [ScoreItem('', what, '')])[0].value), flush=True)\n"
        "pool.score(spec, [ScoreItem('', 'spin', '')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        pids.append(psutil.Process(pids[0]).ppid())
        pids += [int(parent.stdout.readline()) for _ in range(2)]
        before = psutil.Process(pids[0]).cpu_times().user
        eventually(lambda: psutil.Process(pids[0]).cpu_times().user > before + 0.1)  # it spins
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


def test_children_are_found_with_and_without_kernel_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_file(path: Path) -> str:
        raise FileNotFoundError(path)

    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert child.pid in children_of(os.getpid()) and count_descendants(os.getpid(), 100) >= 1
            monkeypatch.setattr(Path, "read_text", no_such_file)
            assert child.pid in children_of(os.getpid())
        finally:
            child.kill()
    assert children_of(child.pid) == []
