"""User code shares its process with the channel that carries answers, and can stop or kill the launcher. Whatever it
does costs only the item that does it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.registry import ScorerSpec, make_spec
from tandem.reward.workers import launcher_process, worker_process
from tandem.reward.workers.answers import STRAY, decode_scores, encode_score, line, payloads
from tandem.reward.workers.child_process import ChildProcess
from tandem.reward.workers.launcher_process import Launchers
from tandem.reward.workers.pool import ScorerPool
from tandem.reward.workers.requests import encode
from tests.reward.workers.conftest import ONE, Make, items, reason, value
from tests.support.processes import wait_until_gone
from tests.support.waiting import eventually

MISCHIEF = r"""
import ctypes, gc, os, signal, socket, sys, threading, time

def worker():
    return next(one for one in gc.get_objects() if type(one).__name__ == "Worker")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    what, _, text = solution_str.partition(" ")
    match what:
        case "pid":
            return os.getpid()
        case "write":
            os.write(3, text.encode().decode("unicode_escape").encode())
        case "forge":  # what only one that looks into the worker could write
            os.write(3, worker()._line(text.encode()))
        case "exit":
            if os.fork() == 0:
                sys.exit(0)
        case "raise":
            if os.fork() == 0:
                raise KeyError("child")
        case "return":
            if os.fork() == 0:
                return 9.0
        case "unseen":  # by Python, that is
            if ctypes.CDLL(None).fork() == 0:
                return 9.0
        case "child":
            if os.fork() == 0:
                try:
                    os.write(3, b"x\n")
                finally:
                    os._exit(0)
            os.wait()
        case "close":
            os.closerange(3, 100)
        case "deaf":
            os.closerange(3, 100)
            time.sleep(600)
        case "hang":
            time.sleep(600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "crash":
            os._exit(4)
        case "peek":  # at the items to come
            with socket.socket(fileno=os.dup(3)) as line:
                try:
                    return len(line.recv(1 << 20, socket.MSG_DONTWAIT))
                except BlockingIOError:
                    return 7.0
        case "thieves":  # for as long as the worker lives
            for _ in range(16):
                threading.Thread(target=lambda: [os.read(3, 100) for _ in range(1000)], daemon=True).start()
    return 7.0

def together(data_sources, solution_strs, ground_truths, extra_infos):
    return [compute_score("", text, None, None) for text in solution_strs]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("mischief") / "mischief.py"
    file.write_text(MISCHIEF)
    return str(file)


SEVEN = Scored(7.0)
WRITES = [r"write x\n", r"write []\n", r"write 7\n", r"write [1.0]\n", r"write [1.0]\n[1.0]\n[1.0]\n[1.0]\n[1.0]\n"]
WRITES += ["write x", r"write \n", "write [[[[", r"write {\"memory\": true}\n"]
WRITES += [
    f"forge {text}" for text in ("[NaN, {}]", "[1e999, {}]", "7", "[]", '["why", ""]', "1],[2", '[1.0, {"a": NaN}]')
]


@pytest.mark.parametrize("function", ["compute_score", "together"])
def test_writing_to_the_channel_costs_only_that_item(pool: ScorerPool, place: str, function: str) -> None:
    spec = make_spec(f"{place}:{function}", {})
    for text in WRITES if function == "compute_score" else WRITES[:4]:
        assert pool.score(spec, items("a", "b", text, "c", "d")) == [SEVEN, SEVEN, STRAY, SEVEN, SEVEN], text
    assert pool.score(spec, items(*"abcdefgh")) == [SEVEN] * 8


@pytest.mark.parametrize("text", ["exit", "raise", "return", "unseen", "child"])
@pytest.mark.parametrize("function", ["compute_score", "together"])
def test_a_forked_child_is_no_second_worker(pool: ScorerPool, place: str, text: str, function: str) -> None:
    spec = make_spec(f"{place}:{function}", {})
    pid = pool.score(make_spec(f"{place}:compute_score", {}), items("pid"))
    assert pool.score(spec, items("a", text, "b", text, "c")) == [SEVEN] * 5
    assert pool.score(spec, items("a")) == [SEVEN]
    assert pool.score(make_spec(f"{place}:compute_score", {}), items("pid")) == pid, "it was not replaced"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("os.write(3, b'x\\n')", STRAY.detail),
        ("if os.fork() == 0: sys.exit(0)", ""),
        ("if os.fork() == 0: raise KeyError", ""),
    ],
)
def test_writing_or_forking_during_import(pool: ScorerPool, tmp_path: Path, source: str, told: str) -> None:
    (tmp_path / "bad.py").write_text(f"import os, sys\n{source}\ndef f(**item):\n    return 7.0\n")
    spec = make_spec(f"{tmp_path}/bad.py:f", {})
    if told:
        with pytest.raises(ScorerError, match=told):
            pool.load(spec)
    else:
        pool.load(spec)
        assert pool.score(spec, items(*"abc")) == [SEVEN] * 3


def test_a_failed_process_is_killed_and_replaced_at_once(
    make_pool: Make, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for a process to exit is set to an hour, so the test fails if it applies to a process that will not
    exit.
    """
    monkeypatch.setattr(worker_process, "_EXIT_SECONDS", 3600.0)
    hasty, patient = make_pool(timeout_seconds=1.0), make_pool(timeout_seconds=600.0)
    spec = make_spec(f"{place}:compute_score", {})
    for pool, text, failed in (
        (hasty, "hang", Unscored("timeout", "no answer within 1 s")),
        (hasty, "stop", Unscored("timeout", "no answer within 1 s")),
        (patient, "crash", Unscored("crashed", "the scoring process exited with code 4")),
        (patient, "deaf", Unscored("crashed", "the scoring process closed its channel")),
    ):
        before, replaced = value(pool.score(spec, items("pid"))[0]), pool.replaced_workers
        request = pool.submit(spec, items("a", text, "b"), "calls")
        eventually(lambda request=request: not request.missing, 120.0)
        assert request.scores == [SEVEN, failed, SEVEN]
        assert not psutil.pid_exists(before) and pool.replaced_workers == replaced + 1


@pytest.mark.parametrize("function", ["compute_score", "together"])
def test_reading_the_channel_finds_no_other_item_and_closing_it_is_crashed(
    pool: ScorerPool, place: str, function: str
) -> None:
    spec = make_spec(f"{place}:{function}", {})
    long = "b " + "x" * 20_000  # longer than the worker's read-ahead
    assert pool.score(spec, items("a")) == [SEVEN]
    replaced = pool.replaced_workers
    assert pool.score(spec, items("a", "peek", *[long] * 20)) == [SEVEN] * 22
    assert pool.replaced_workers == replaced
    first, closed, last = pool.score(spec, items("a", "close", "b"))
    assert first == last == SEVEN and reason(closed) == "crashed"


def test_threads_that_keep_reading_the_channel_cost_a_worker_but_no_item(
    make_pool: Make, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "STARTUP_SECONDS", 2.0)
    pool = make_pool(timeout_seconds=0.5)
    spec, another = make_spec(f"{place}:compute_score", {}), make_spec("regex", {"pattern": "(.)"})
    for judged, expected in [(spec, SEVEN), (another, Scored(1.0))]:
        assert pool.score(spec, items("a", "thieves", "b")) == [SEVEN] * 3
        assert pool.score(judged, [ScoreItem("test", "c", "c")] * 5) == [expected] * 5


def test_a_worker_answers_nothing_before_it_has_read_the_whole_chunk(place: str, launchers: Launchers) -> None:
    """Otherwise code that takes a part of the chunk would use up the time of an item."""
    worker = launchers.spawn(())
    lines = b"".join(line for item in items("a", "b") if isinstance(line := encode(item), bytes))
    header = {"scorer": f"{place}:compute_score", "arguments": "{}", "preload": [], "items": 2, "bytes": len(lines)}
    worker._connection.sendall(json.dumps({**header, "token": "t"}).encode() + b"\n" + lines[:-5])
    told = select.poll()
    told.register(worker._connection, select.POLLIN)
    assert not told.poll(300)
    worker._connection.sendall(lines[-5:])
    assert told.poll(30_000) and worker._connection.recv(100).startswith(b't 1 {"ready": true')
    worker.close()


def test_an_importing_launcher_delays_no_other_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launchers: Launchers
) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import pathlib, time\nhere = pathlib.Path(__file__).parent\n(here / 'begun').touch()\n"
        "while not (here / 'go').exists():\n    time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spawned: list[Any] = []
    first = launchers.spawn(())
    importing = threading.Thread(target=lambda: spawned.append(launchers.spawn(("slow_to_import",))))
    try:
        importing.start()
        eventually((tmp_path / "begun").exists, 25.0)
        first.kill()
        second = launchers.spawn(())
        assert not psutil.pid_exists(first.pid) and second.alive and not spawned, "the other one still imports"
        second.close()
    finally:
        (tmp_path / "go").touch()
        importing.join(timeout=30.0)
        for worker in [first, *spawned]:
            worker.close()
    assert len(spawned) == 1


def test_answer_lines_need_their_token_and_number() -> None:
    scores: list[Score] = [Scored(1.0), Scored(0.5, {"a": 1.0}), Unscored("limit", "\ud800")]
    lines = [line(b"t", number, encode_score(score))[:-1] for number, score in enumerate(scores, start=2)]
    assert decode_scores(payloads(lines, b"t", 2)) == (scores, "")
    for token, number in [(b"t", 1), (b"u", 2)]:
        assert payloads(lines, token, number) == []
    assert len(payloads([lines[0], lines[2]], b"t", 2)) == 1
    assert decode_scores([b"[1.0, {}]", b'{"memory": true}']) == ([Scored(1.0)], "memory")
    assert decode_scores([b"[1.0, {}]", b'{"ready": true}']) == ([Scored(1.0)], "stray")
    assert decode_scores([b"[1.0, {}]", b"[" * 100_000]) == ([Scored(1.0)], "stray")
    for bad in (b"[true, 1, 2]", b"[1.0, []]", b'["limit"]', b'["limit", 3]', b"[" + b"9" * 400 + b"]", b"null", b""):
        assert decode_scores([bad]) == ([], "stray"), bad
    assert decode_scores([encode_score(Scored(float("nan")))]) == (
        [Unscored("infrastructure", "the scorer answered nan, not a finite number")],
        "",
    )


# ---- launchers that die, stop or hang ----


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
