"""The pool of worker processes: a hang, a crash or a broken limit costs one item, lanes take turns, nothing outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.contracts import Score, Scored, ScoreItem, Unscored
from protos.errors import ScorerError
from reward import requests
from reward.config import LimitsConfig, RewardConfig
from reward.lanes import LANES, SHARE, Lane, Lanes
from reward.pool import ScorerPool
from reward.processes import _children_by_parent, children_of, count_descendants
from reward.registry import ScorerSpec, make_spec
from reward.requests import Request
from tests.processes import wait_until_gone

TROUBLE = r"""
import hashlib, os, re, signal, subprocess, sys, threading, time

kept = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    match solution_str:
        case "hang":
            time.sleep(600)
        case "spin":  # holds the interpreter's lock for ever
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "burn":  # four threads, most of it without the interpreter's lock: more processor time than wall time
            burn = lambda: [hashlib.sha256(bytes(1 << 20)) for _ in range(10**6)]
            [threading.Thread(target=burn).start() for _ in range(3)]
            burn()
        case "exit":
            print("no way on", file=sys.stderr, flush=True)
            os._exit(3)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "print":
            print("spoken by the scorer")
        case "chat":
            for _ in range(5000):
                print("a line that is quite long, " * 4)
        case "pid":
            return os.getpid()
        case "child":
            return subprocess.Popen(["sleep", "600"]).pid
        case "daemon":  # leaves its session and its parent
            command = "import os, subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
            return int(subprocess.run([sys.executable, "-c", command], capture_output=True, start_new_session=True).stdout)
        case "children":
            for _ in range(20):
                subprocess.Popen(["sleep", "600"])
            time.sleep(600)
        case "bomb":
            while True:
                os.fork()
        case "memory":
            return len(b"1" * (1 << 40))
        case "leak":
            kept.append(bytearray(16 << 20))
        case "files":
            return len([open("/dev/null") for _ in range(10_000)])
        case "babble":
            while True:
                print("word " * 1000)
        case "large":
            return {"score": 1.0, "x" * (2 << 20): 1.0}
    return float(solution_str == ground_truth)


def together(data_sources, solution_strs, ground_truths, extra_infos):
    if "raise" in solution_strs:
        raise KeyError("raise")
    for text in solution_strs:
        if text != "length":
            compute_score("", text, "", {})
    if "length" in solution_strs:
        return [1.0]
    return [{"score": float(s == g), "batch": len(solution_strs)} for s, g in zip(solution_strs, ground_truths)]
"""


@pytest.fixture
def trouble(tmp_path: Path) -> str:
    file = tmp_path / "trouble.py"
    file.write_text(TROUBLE)
    return f"{file}:compute_score"


@pytest.fixture
def spec(trouble: str) -> ScorerSpec:
    return make_spec(trouble, {})


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ScorerPool]]:
    pools: list[ScorerPool] = []

    def make(
        num_workers: int = 1, timeout_seconds: float = 20.0, startup_seconds: float = 60.0, **limits: Any
    ) -> ScorerPool:
        config = RewardConfig(num_workers=num_workers, timeout_seconds=timeout_seconds, limits=LimitsConfig(**limits))
        pools.append(ScorerPool(config, startup_seconds=startup_seconds))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


Make = Callable[..., ScorerPool]


def items(*solutions: str) -> list[ScoreItem]:
    return [ScoreItem("test", solution, "1") for solution in solutions]


def reason(score: Score) -> str:
    assert isinstance(score, Unscored), score
    return score.reason


def value(score: Score) -> int:
    assert isinstance(score, Scored), score
    return int(score.value)


# ---- trouble ----


@pytest.mark.parametrize("num_workers", [1, 2])
def test_trouble_costs_exactly_its_item(make_pool: Make, spec: ScorerSpec, num_workers: int) -> None:
    pool = make_pool(num_workers, timeout_seconds=1.0)
    scores = pool.score(spec, items("1", "hang", "0", "exit", "segv", "1", "spin", "1"))
    assert scores[0] == scores[5] == scores[7] == Scored(1.0) and scores[2] == Scored(0.0)
    assert scores[1] == scores[6] == Unscored("timeout", "no answer within 1 s")
    assert scores[3] == Unscored("crashed", "the scoring process exited with code 3; it last wrote: no way on")
    assert scores[4] == Unscored("crashed", "the scoring process was killed by SIGSEGV")


def test_of_ten_hanging_and_ten_crashing_in_a_hundred_the_others_get_their_scores(
    make_pool: Make, spec: ScorerSpec
) -> None:
    texts = [{3: "hang", 7: "exit"}.get(n % 10, str(n % 2)) for n in range(100)]
    pool = make_pool(2, timeout_seconds=1.0)
    scores = pool.score(spec, items(*texts))
    for text, score in zip(texts, scores, strict=True):
        expected = {"hang": "timeout", "exit": "crashed"}.get(text)
        assert (reason(score) == expected) if expected else (score == Scored(float(text == "1"))), (text, score)


def test_a_hang_in_one_caller_does_not_hold_another(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool(2, timeout_seconds=60.0)
    hanging = pool.submit(spec, items("hang"), "calls")
    assert pool.score(spec, items("1", "0", "1")) == [Scored(1.0), Scored(0.0), Scored(1.0)]
    assert hanging.missing == 1
    pool.close()
    assert [reason(score) for score in hanging.wait()] == ["infrastructure"]


def test_many_items_in_order(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool(2)
    expected = [n % 3 == 0 for n in range(3000)]
    scores = pool.score(spec, items(*("1" if right else "0" for right in expected)))
    assert scores == [Scored(float(right)) for right in expected]
    assert pool.score(spec, []) == []
    assert pool.figures()["worker_items_calls"] == 3000


def test_large_items_and_much_output_do_not_jam(
    make_pool: Make, spec: ScorerSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool()
    large = "x" * 3_000_000
    assert pool.score(spec, items(large, "chat", "print", large, "1"))[-1] == Scored(1.0)
    pool.score(spec, items("1"))
    assert "spoken by the scorer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "limits", "told"),
    [
        ("memory", {}, "more than 4294967296 bytes of memory"),
        ("babble", {"output_bytes": 1 << 16}, "it printed more than 65536 bytes"),
        ("children", {"processes": 10}, "more than 10 processes at a time"),
        ("bomb", {"processes": 10}, "more than 10 processes at a time"),
        ("files", {"open_files": 64}, "Too many open files"),
        ("burn", {"cpu_seconds": 0.2}, "more than 0.2 s of processor time"),
        ("large", {}, "an answer of more than 1048576 bytes"),
    ],
)
def test_past_a_limit(
    make_pool: Make, spec: ScorerSpec, text: str, limits: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool(timeout_seconds=60.0, **limits)
    before, broken, after = pool.score(spec, items("1", text, "0"))
    assert (before, after) == (Scored(1.0), Scored(0.0))
    assert isinstance(broken, Unscored) and broken.reason == "limit" and told in broken.detail
    capsys.readouterr()


def test_output_counts_by_the_item(make_pool: Make, spec: ScorerSpec, capsys: pytest.CaptureFixture[str]) -> None:
    """`chat` prints about 570 kB: two of them are above the limit together, and each is below it."""
    pool = make_pool(output_bytes=800_000)
    assert pool.score(spec, items(*["chat"] * 4)) == [Scored(0.0)] * 4
    capsys.readouterr()


def test_an_item_does_not_pay_for_the_memory_of_others(make_pool: Make, spec: ScorerSpec) -> None:
    """Each leaks 16 MB of 256: the process gives way to another in time, or the one it strikes is judged again in a fresh one."""
    pool = make_pool(memory_bytes=256 << 20)
    assert pool.score(spec, items(*["leak"] * 60)) == [Scored(0.0)] * 60
    assert pool.replaced_workers >= 2


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (ScoreItem("test", "1", "1", {"bytes": b"x"}), "not JSON"),
        (ScoreItem("test", "1", {1: {2, 3}}), "not JSON"),
        (ScoreItem("test", "1", "x" * 3000), "takes 30"),
    ],
)
def test_an_item_that_cannot_be_sent_is_unscored(
    make_pool: Make, spec: ScorerSpec, monkeypatch: pytest.MonkeyPatch, item: ScoreItem, told: str
) -> None:
    monkeypatch.setattr(requests, "MAX_ITEM_BYTES", 2000)
    scores = make_pool().score(spec, [*items("1"), item, *items("0")])
    assert [scores[0], scores[2]] == [Scored(1.0), Scored(0.0)]
    assert reason(scores[1]) == "invalid_input" and told in scores[1].detail  # type: ignore[union-attr]


def test_deep_and_odd_items_come_to_no_harm(make_pool: Make, spec: ScorerSpec) -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    less_deep: list[Any] = []
    for _ in range(900):
        less_deep = [less_deep]
    odd = [
        ScoreItem("test", "1", deep),
        ScoreItem("test", "1", less_deep),
        ScoreItem("test", "\ud800\0", "1"),
        *items("1"),
    ]
    scores = make_pool().score(spec, odd)
    assert reason(scores[0]) == "invalid_input" and scores[3] == Scored(1.0)
    assert scores[1] == Scored(0.0) or reason(scores[1]) == "invalid_input"


def test_a_process_that_died_idle_blames_no_item(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    pid = value(pool.score(spec, items("pid"))[0])
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    assert pool.score(spec, items("1")) == [Scored(1.0)] and pool.replaced_workers == 1


def test_a_launcher_that_died_is_started_anew(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    pid = value(pool.score(spec, items("pid"))[0])
    launcher = psutil.Process(pid).ppid()
    os.kill(launcher, signal.SIGKILL)
    wait_until_gone(pid)
    again = value(pool.score(spec, items("pid"))[0])
    assert psutil.Process(again).ppid() != launcher


# ---- judges ----


def test_a_worker_serves_every_scorer_and_keeps_its_judges(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    regex = make_spec("regex", {"pattern": "(.)"})
    first = value(pool.score(spec, items("pid"))[0])
    assert pool.score(regex, items("1", "2")) == [Scored(1.0), Scored(0.0)]
    assert value(pool.score(spec, items("pid"))[0]) == first


def test_functions_of_two_folders_do_not_meet(make_pool: Make, tmp_path: Path) -> None:
    specs = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "shared.py").write_text(f"VALUE = {number}\n")
        (folder / "score.py").write_text("import shared\n\ndef f(**item):\n    return shared.VALUE\n")
        specs.append(make_spec(f"{folder}/score.py:f", {}))
    pool = make_pool()
    for _ in range(2):
        assert [pool.score(spec, items("x")) for spec in specs] == [[Scored(1.0)], [Scored(2.0)]]


def test_a_batch_function_gets_batches_and_a_culprit_is_found(make_pool: Make, trouble: str) -> None:
    pool = make_pool(timeout_seconds=1.0)
    spec = make_spec(trouble.replace("compute_score", "together"), {})
    texts = ["1"] * 40
    texts[5], texts[17], texts[30] = "exit", "hang", "raise"
    scores = pool.score(spec, items(*texts))
    assert [reason(scores[n]) for n in (5, 17, 30)] == ["crashed", "timeout", "crashed"]
    good = [score for n, score in enumerate(scores) if n not in (5, 17, 30)]
    assert all(isinstance(score, Scored) and score.value == 1.0 for score in good)
    assert max(score.breakdown["batch"] for score in good if isinstance(score, Scored)) > 1
    assert [reason(score) for score in pool.score(spec, items("1", "length"))] == ["crashed"] * 2


def test_coroutines_run_side_by_side_and_one_that_blocks_is_found(make_pool: Make, tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text(
        "import asyncio, time\n"
        "async def f(solution_str, **item):\n"
        "    if solution_str == 'block':\n"
        "        time.sleep(600)\n"
        "    await asyncio.sleep(600 if solution_str == 'hang' else 0.01)\n"
        "    return 1.0\n"
    )
    pool, spec = make_pool(timeout_seconds=2.0), make_spec(f"{tmp_path}/later.py:f", {})
    texts = ["1"] * 60
    texts[20], texts[50] = "hang", "block"
    scores = pool.score(spec, items(*texts))
    assert scores[20] == Unscored("timeout", "no answer within 1.8 s")
    assert scores[50] == Unscored("timeout", "no answer within 2 s")
    assert [n for n, score in enumerate(scores) if score != Scored(1.0)] == [20, 50]


def test_many_crashes_leave_nothing_open(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool(2)
    launcher = psutil.Process(value(pool.score(spec, items("pid"))[0])).parent()
    assert launcher is not None
    pool.score(spec, items(*["exit"] * 4, "1", "1", "1"))
    here, there = psutil.Process().num_fds(), launcher.num_fds()
    pool.score(spec, items(*["exit"] * 60, "1", "1", "1"))
    assert psutil.Process().num_fds() <= here + 4 and launcher.num_fds() <= there + 2
    assert len(launcher.children()) <= 2 and pool.replaced_workers == 64


@settings(deadline=None)
@given(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=40), st.integers(1, 12))
def test_groups_stay_together(groups: list[str], size: int) -> None:
    spec = ScorerSpec("by_group", "{}", "worker", grouped=True)
    request = Request(
        spec, [ScoreItem("", str(n), None, group=group) for n, group in enumerate(groups)], "calls", lambda: None
    )
    chunks = []
    while request.todo:
        chunk = request.cut(size)
        if len(chunks) % 2:  # what is put back comes again, whole
            request.put_back(chunk)
            assert request.cut(size)[: len(chunk)] == chunk[: len(chunk)]
        chunks.append(chunk)
    assert sorted(number for chunk in chunks for number in chunk) == list(range(len(groups)))
    homes: dict[str, set[int]] = {}
    for place, chunk in enumerate(chunks):
        for number in chunk:
            homes.setdefault(groups[number], set()).add(place)
    assert all(len(places) == 1 for group, places in homes.items() if group)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import os\nos._exit(7)\n", "the scoring process exited with code 7"),
        ("import time\ntime.sleep(600)\n", "no answer within 3 s"),
        ("raise SystemExit(0)\n", "does not import: SystemExit"),
        ("x = b'1' * (1 << 40)\n", "does not import: MemoryError"),
    ],
)
def test_a_module_that_takes_the_process_down(make_pool: Make, tmp_path: Path, source: str, told: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    pool = make_pool(startup_seconds=3.0)
    spec = make_spec(f"{tmp_path}/bad.py:f", {})
    pool.load(make_spec("regex", {"pattern": "."}))  # the launcher is up
    with pytest.raises(ScorerError) as caught:
        pool.load(spec)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    (score,) = pool.score(spec, items("1"))
    assert reason(score) == "infrastructure" and told in score.detail  # type: ignore[union-attr]


def test_a_file_named_like_a_module_of_ours(make_pool: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(**everything):\n    return 0.75\n")
    monkeypatch.chdir(tmp_path)
    assert make_pool().score(make_spec("reward.py:compute_score", {}), items("1")) == [Scored(0.75)]


# ---- lanes ----


class Slot:
    """Somebody who always has more."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane


@settings(deadline=None)
@given(st.sets(st.sampled_from(LANES), min_size=1), st.integers(1, 400))
def test_lanes_go_by_priority_and_none_starves(busy: set[Lane], turns: int) -> None:
    lanes: Lanes[Slot] = Lanes()
    for lane in busy:
        lanes.add(lane, Slot(lane))
    served: list[Lane] = []
    for _ in range(turns):
        found = lanes.next()
        assert found is not None
        lane, slot = found
        served.append(lane)
        lanes.add(lane, slot)
    counts, order = Counter(served), [lane for lane in LANES if lane in busy]
    left = turns
    for lane in order[:-1]:  # of every SHARE turns a lane has with others below it, one is theirs
        assert counts[lane] == left - left // SHARE
        left //= SHARE
    assert counts[order[-1]] == left
    waits = SHARE ** (len(order) - 1)
    assert all(set(served[start : start + waits]) == busy for start in range(0, turns - waits + 1, waits))


def test_those_in_one_lane_take_turns() -> None:
    lanes: Lanes[str] = Lanes()
    for name in ("a", "b", "c"):
        lanes.add("calls", name)
    served = []
    for _ in range(6):
        found = lanes.next()
        assert found is not None
        served.append(found[1])
        lanes.add(*found)
    assert served == ["a", "b", "c", "a", "b", "c"]
    lanes.put_back("calls", "now")
    assert lanes.next() == ("calls", "now")


def test_the_ring_passes_a_job_and_the_job_goes_on(make_pool: Make, tmp_path: Path) -> None:
    """One worker, scorers that write down who is judged: groups overtake a job that came first, and do not stop it."""
    (tmp_path / "note.py").write_text(
        "import time\n\ndef f(solution_str, extra_info, **item):\n"
        f"    open({str(tmp_path / 'order')!r}, 'a').write(solution_str)\n    time.sleep(0.02)\n    return 1.0\n"
    )
    pool, spec = make_pool(), make_spec(f"{tmp_path}/note.py:f", {})
    pool.load(spec)
    job = pool.submit(spec, items(*["j"] * 200), "jobs")
    while not (tmp_path / "order").exists():
        time.sleep(0.005)
    ring = pool.submit(spec, items(*["r"] * 40), "ring")
    ring.wait()
    order = (tmp_path / "order").read_text()
    assert job.missing > 100, "the ring did not wait for the job"
    during = order[order.index("r") : order.rindex("r")]
    assert 0 < during.count("j") <= during.count("r"), "the job was not starved meanwhile, nor did it get most"
    pool.close()


# ---- the end ----


def test_close_ends_what_hangs_and_everything_it_started(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    pids = [value(score) for score in pool.score(spec, items("pid", "child", "daemon"))]
    launcher = psutil.Process(pids[0]).ppid()
    request = pool.submit(spec, items("1", "hang", "1"), "calls")
    while request.missing > 2:
        time.sleep(0.01)
        if request.scores[0] is None and pool.figures()["worker_items_calls"] >= 3:
            break  # answers are entered with their chunk
    time.sleep(0.2)
    pool.close()
    assert request.wait() == [Scored(1.0), *[Unscored("infrastructure", "the scorer is closing")] * 2]
    for pid in [*pids, launcher]:
        wait_until_gone(pid)
    assert [reason(score) for score in pool.score(spec, items("1"))] == ["infrastructure"]


@pytest.mark.parametrize("left", ["child", "daemon"])
def test_what_an_item_left_running_ends_with_its_worker(make_pool: Make, spec: ScorerSpec, left: str) -> None:
    pool = make_pool()
    child, _ = pool.score(spec, items(left, "exit"))
    wait_until_gone(value(child))


def test_a_daemon_does_not_survive_even_while_its_worker_lives(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool()
    pid, daemon = (value(score) for score in pool.score(spec, items("pid", "daemon")))
    wait_until_gone(daemon)
    assert value(pool.score(spec, items("pid"))[0]) == pid


@pytest.mark.parametrize("doing", ["spin", "child", "daemon"])
def test_everything_dies_with_the_service_even_when_it_is_killed(trouble: str, doing: str) -> None:
    code = (
        "from reward.config import RewardConfig\n"
        "from reward.pool import ScorerPool\n"
        "from reward.registry import make_spec\n"
        "from protos.contracts import ScoreItem\n"
        f"pool, spec = ScorerPool(RewardConfig(timeout_seconds=60)), make_spec({trouble!r}, {{}})\n"
        "print(int(pool.score(spec, [ScoreItem('', 'pid', '')])[0].value), flush=True)\n"
        f"print(int(pool.score(spec, [ScoreItem('', {doing!r}, '')])[0].value), flush=True)\n"
        "pool.score(spec, [ScoreItem('', 'hang', '')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
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


def test_a_bug_in_a_thread_of_the_pool_is_told_to_who_waits(
    make_pool: Make, spec: ScorerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    monkeypatch.setattr(pool, "note_pace", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError) as caught:
        pool.score(spec, items("1"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_children_are_found_with_and_without_the_kernels_lists() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert child.pid in children_of(os.getpid()) and child.pid in _children_by_parent(os.getpid())
            assert count_descendants(os.getpid(), 100) >= 1
        finally:
            child.kill()
    assert children_of(child.pid) == []


def test_callers_in_many_threads(make_pool: Make, spec: ScorerSpec) -> None:
    pool = make_pool(2)
    found: dict[int, list[Score]] = {}

    def call(number: int) -> None:
        found[number] = pool.score(spec, items(*["1" if n % number else "0" for n in range(50)]), LANES[number % 3])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    assert found == {k: [Scored(float(bool(n % k))) for n in range(50)] for k in range(1, 9)}


def test_a_worker_imports_no_grpc_redis_numpy_or_torch() -> None:
    code = (
        "import sys, reward.launcher\n"
        "heavy = {'grpc', 'redis', 'torch', 'numpy', 'pyarrow', 'sympy', 'transformers', 'httpx', 'jsonschema'}\n"
        "print(*(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert done.stdout.strip() == ""


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=5), st.recursive(st.none() | st.floats() | st.text(), st.lists))
def test_items_arrive_as_they_were_sent(texts: list[str], truth: Any) -> None:
    from reward.worker import _decoded

    for text in texts:
        item = ScoreItem(text, text[::-1], truth, {text: truth}, text)
        line = requests.encode(item)
        assert isinstance(line, bytes)
        assert repr(_decoded(line)) == repr(item)
