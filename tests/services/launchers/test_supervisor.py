"""A process group: restarts, giving up, user errors, Ctrl-C, and no process left. Its children are small programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.protos.errors import LINES_ABOVE
from tandem.services.launchers import process_group
from tandem.services.launchers.children import ChildSpec, kill_marked
from tandem.services.launchers.process_group import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    SCALED_SERVICES,
    USER_ERROR,
    ProcessGroup,
)
from tandem.services.process import PROCESS_MARK_VARIABLE
from tandem.services.run import redis_child
from tests.support.paths import ROOT
from tests.support.processes import has_ended, run_python
from tests.support.waiting import eventually

DEADLINE_SECONDS = 20.0

SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
TELLS = (
    "import signal, time; signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True)); "
    "print('ready', flush=True); time.sleep(600)"
)
# Starts as `tandem serve` does, with a child that does the same in a session of its own.
MORTAL = """
import os, subprocess, sys, time
from tandem.services.process import die_with_parent
die_with_parent(int(os.environ["TANDEM_PARENT_PID"]))
inner = '''
import sys, time
from tandem.services.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
'''
command = [sys.executable, "-c", inner, str(os.getpid())]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
DRIVER = """
import json, sys
from pathlib import Path
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.process_group import ProcessGroup
folder, table = Path(sys.argv[1]), json.loads(sys.argv[2])
processes = ProcessGroup(report=lambda line: print(line, flush=True))
specs = [ChildSpec(name, (sys.executable, "-c", code), folder / f"{name}.log") for name, code in table.items()]
processes.add(specs)
with processes.signals():
    sys.exit(processes.run())
"""


Start = Callable[[dict[str, str]], subprocess.Popen[str]]
Replicas = Callable[..., None]
"""Orders this many replicas; the programs of replicas may be changed by name."""


def assert_(condition: bool) -> None:
    assert condition


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_child, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process group in a process of its own, as `tandem run` does."""
    with ExitStack() as stack:

        def start_processes(table: dict[str, str]) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", DRIVER, str(tmp_path), json.dumps(table)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start_processes


def run_processes(
    folder: Path, table: dict[str, str], *, keep_logs: bool = True
) -> tuple[int, list[str], ProcessGroup]:
    said: list[str] = []
    processes = ProcessGroup(report=said.append, keep_logs=keep_logs)
    processes.add(ChildSpec(name, (sys.executable, "-c", code), folder / f"{name}.log") for name, code in table.items())
    return processes.run(), said, processes


def log_says(file: Path, text: str) -> bool:
    return file.is_file() and any(line.startswith(text) for line in file.read_text().splitlines())


def pids_in(file: Path) -> list[int]:
    return [int(pid) for line in file.read_text().splitlines() if line.startswith("pids") for pid in line.split()[1:]]


def test_the_end_of_the_trainer_alone_ends_the_run_and_every_other_child(tmp_path: Path) -> None:
    table = {"feed": "pass", "rollout-0": SLEEP, "trainer": "import time; time.sleep(0.5); print('trained')"}
    outcome, said, processes = run_processes(tmp_path, table)
    assert outcome == FINISHED
    assert processes.states()["feed"] == ("stopped", 0, 0)
    assert {state for state, _, _ in processes.states().values()} == {"stopped"}
    assert not any(child.alive for child in processes.children)
    assert said == []
    assert log_says(tmp_path / "trainer.log", "trained")


def test_a_child_waits_for_the_one_it_starts_after(tmp_path: Path) -> None:
    said: list[str] = []
    processes = ProcessGroup(report=said.append)
    beats = {"rollout-0": 0.0}
    processes.last_heartbeat = lambda name: beats.get(name, 0.0)
    seen: list[str] = []

    def poll() -> None:
        seen.append(processes.states()["rollout-1"][0])
        if len(seen) == 5:
            beats["rollout-0"] = float("inf")
        if seen[-1] == "starting":
            processes.finish()

    processes.on_poll.append(poll)
    for name, after in (("rollout-0", ""), ("rollout-1", "rollout-0")):
        spec = ChildSpec(name, (sys.executable, "-c", SLEEP), tmp_path / f"{name}.log", start_after=after)
        processes.add([spec])
    assert processes.run() == FINISHED
    assert seen[:5] == ["waiting"] * 5 and seen[-1] == "starting"
    assert said == [], "an end that was not requested is not announced as a stop"


def run_scaled(
    folder: Path, play: Callable[[ProcessGroup, Replicas], Iterator[bool]], service: str = "rollout"
) -> tuple[int, list[str]]:
    """Runs a trainer and `play`, which orders replicas and yields conditions to wait for."""
    said: list[str] = []
    processes = ProcessGroup(report=said.append)
    processes.add([ChildSpec("trainer", (sys.executable, "-c", SLEEP), folder / "t.log")])
    codes = defaultdict(lambda: SLEEP)

    def order(count: int, **changed: str) -> None:
        codes.update(changed)
        names = [f"{service}-{number}" for number in range(count)]
        specs = [ChildSpec(name, (sys.executable, "-c", codes[name]), folder / f"{name}.log") for name in names]
        processes.set_replicas(service, specs)

    playing = play(processes, order)
    processes.on_poll.append(lambda: None if next(playing, True) is not True else processes.finish())
    return processes.run(), said


@pytest.mark.parametrize("service", SCALED_SERVICES)
def test_replicas_join_drain_and_leave_while_the_run_goes_on(tmp_path: Path, service: str) -> None:
    drained = threading.Event()

    def play(processes: ProcessGroup, order: Replicas) -> Iterator[bool]:
        processes.drain = lambda name: assert_(name == f"{service}-1" and drained.wait(DEADLINE_SECONDS))
        order(2)
        while len(processes.children) < 3:
            yield False
        leaver = processes.children[2]
        order(1)
        while leaver.state != "draining":
            yield False
        for _ in range(5):
            yield False
        assert leaver.alive, "it has work left"
        drained.set()
        while leaver in processes.children:
            yield False
        assert not leaver.alive and processes.states().keys() == {"trainer", f"{service}-0"}
        yield True

    outcome, said = run_scaled(tmp_path, play, service)
    assert outcome == FINISHED
    assert said == [f"{service}-0 joins the run", f"{service}-1 joins the run", f"{service}-1 has left the run"]


def test_a_replica_that_cannot_start_or_that_dies_as_it_leaves_ends_no_run(tmp_path: Path) -> None:
    complains = "import sys; print('tandem: rollout.port: in use'); sys.exit(2)"

    def play(processes: ProcessGroup, order: Replicas) -> Iterator[bool]:
        processes.drain = lambda name: os.kill(processes.states()[name][1], signal.SIGKILL)
        order(2, **{"rollout-1": complains})
        while len(processes.children) < 3:
            yield False
        while "rollout-1" in processes.states():
            yield False
        order(0)
        while len(processes.children) > 1:
            yield False
        yield True

    outcome, said = run_scaled(tmp_path, play)
    assert outcome == FINISHED
    assert said[2:] == [
        "tandem: rollout-1: rollout.port: in use",
        "the run goes on without rollout-1",
        "rollout-0 has left the run",
    ]


@pytest.mark.parametrize(
    ("death", "cause"),
    [("sys.exit('engine out of order')", "exit code 1: engine out of order)"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_a_child_that_dies_is_restarted_and_the_cause_is_reported(tmp_path: Path, death: str, cause: str) -> None:
    dies_once = (
        f"import os, pathlib, sys; mark = pathlib.Path({str(tmp_path / 'mark')!r}); done = mark.exists()\n"
        f"mark.touch(); print('life', flush=True); done or {death}"
    )
    outcome, said, processes = run_processes(tmp_path, {"trainer": dies_once})
    assert outcome == FINISHED
    assert processes.states()["trainer"] == ("stopped", 0, 1)
    assert len(said) == 1 and f"trainer died ({cause}" in said[0]
    assert (tmp_path / "trainer.log").read_text().splitlines().count("life") == 2, "both lives write to one log"


def test_it_gives_up_with_an_error_after_five_deaths_in_a_row(tmp_path: Path) -> None:
    table = {"trainer": SLEEP, "reward": "raise RuntimeError('no such scorer')"}
    outcome, said, processes = run_processes(tmp_path, table)
    assert outcome == FAILED
    assert processes.states()["reward"][2] == redis_child.MOST_DEATHS - 1
    assert any("reward died" in line and "giving up" in line for line in said)
    assert any("RuntimeError: no such scorer" in line for line in said[-12:]), "its last lines are shown"
    assert not any(child.alive for child in processes.children)


def test_a_users_error_ends_the_run_at_once_with_its_line(tmp_path: Path) -> None:
    complains = "import sys; print('tandem: reward.port: in use', file=sys.stderr); print('noise'); sys.exit(2)"
    outcome, said, processes = run_processes(tmp_path, {"trainer": SLEEP, "reward": complains})
    assert outcome == USER_ERROR
    assert said == ["tandem: reward: reward.port: in use"]
    assert processes.states()["reward"][2] == 0, "it is not started again"


ENGINE_ENDS = f"""
import sys
print("(EngineCore pid=7) ERROR 11-21 17:00:00 [core.py:1510] Traceback (most recent call last):")
print("ValueError: an earlier one")
print("(EngineCore pid=7) ERROR 11-21 17:00:00 [core.py:1510] ValueError: No available memory for the cache blocks.")
print("Process EngineCore:")
print("tandem: the engine: RuntimeError: no core; {LINES_ABOVE}")
sys.exit(2)
"""


NO_EXCEPTION = f"import sys; print('tandem: the engine: RuntimeError: no core; {LINES_ABOVE}'); sys.exit(2)"


@pytest.mark.parametrize(
    ("program", "keep_logs", "says"),
    [
        (ENGINE_ENDS, True, "{log} names the cause: ValueError: No available memory for the cache blocks."),
        (ENGINE_ENDS, False, "its log names the cause: ValueError: No available memory for the cache blocks."),
        (NO_EXCEPTION, True, "{log} names the cause"),
    ],
)
def test_an_error_that_refers_to_lines_above_quotes_the_last_exception_and_the_log(
    tmp_path: Path, program: str, keep_logs: bool, says: str
) -> None:
    outcome, said, _ = run_processes(tmp_path, {"trainer": SLEEP, "rollout-0": program}, keep_logs=keep_logs)
    assert outcome == USER_ERROR
    cause = says.format(log=tmp_path / "rollout-0.log")
    assert said == [f"tandem: rollout-0: the engine: RuntimeError: no core; {cause}"]


@pytest.mark.parametrize(
    ("is_full", "ends"),
    [
        (True, "import sys; print('tandem: half of a li'); sys.exit(2)"),
        (False, "raise OSError(28, 'No space left on device')"),
    ],
)
def test_a_full_disk_is_the_users_error_and_no_output_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool, ends: str
) -> None:
    monkeypatch.setattr(process_group, "disk_full", lambda folder: is_full)
    outcome, said, _ = run_processes(tmp_path, {"trainer": ends})
    assert outcome == USER_ERROR
    assert said == [f"tandem: trainer: the disk of {tmp_path} is full; free space there, then go on with --resume"]


def test_processes_left_by_a_dead_child_are_ended_before_its_restart(tmp_path: Path) -> None:
    """A leftover process would hold ports, GPU memory, or the ranks' rendezvous."""
    note = tmp_path / "note"
    leaves = f"""
import pathlib, subprocess, sys, time
note = pathlib.Path({str(note)!r})
if not note.exists():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    note.write_text(str(child.pid))
    sys.exit(1)
stat = pathlib.Path(f"/proc/{{note.read_text()}}/stat")
for _ in range(100):
    if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
        sys.exit(0)
    time.sleep(0.05)
sys.exit("it is still there")
"""
    outcome, said, _ = run_processes(tmp_path, {"trainer": leaves})
    assert outcome == FINISHED and len(said) == 1, said


def test_end_lineage_ends_no_other_process() -> None:
    token = uuid.uuid4().hex
    bystander, victim = (
        subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, PROCESS_MARK_VARIABLE: mark})
        for mark in (f"{token}x:feed", f"{token}:feed")
    )
    try:
        eventually(lambda: kill_marked(token) == [victim.pid])  # before its exec it still has our environment
        assert victim.wait(timeout=DEADLINE_SECONDS) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        for process in (bystander, victim):
            process.kill()
            process.wait(timeout=DEADLINE_SECONDS)


def test_ctrl_c_of_a_terminal_reaches_the_supervisor_alone_and_ends_even_unresponsive_children(
    tmp_path: Path, start: Start
) -> None:
    process = start({"trainer": STUBBORN, "feed": TELLS, "reward": MORTAL})
    logs = {"trainer": "deaf", "feed": "ready", "reward": "pids"}
    eventually(lambda: all(log_says(tmp_path / f"{name}.log", text) for name, text in logs.items()))
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    said, _ = process.communicate(timeout=10.0)
    assert process.returncode == INTERRUPTED
    assert "trainer did not stop after SIGTERM; killed" in said and "feed did not stop" not in said
    assert not log_says(tmp_path / "feed.log", "interrupted")
    eventually(lambda: all(map(has_ended, pids_in(tmp_path / "reward.log"))))


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path, start: Start) -> None:
    process = start({"trainer": STUBBORN})
    eventually(lambda: log_says(tmp_path / "trainer.log", "deaf"))
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert "stopping" in process.stdout.readline()
    time.sleep(process_group.DOUBLED_SECONDS + 0.1)  # one that comes sooner is the first one, doubled
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=process_group.SIGKILL_AFTER_SECONDS - 2.0) == INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_termination_signals_act_as_ctrl_c(number: signal.Signals, tmp_path: Path, start: Start) -> None:
    process = start({"trainer": MORTAL})
    eventually(lambda: log_says(tmp_path / "trainer.log", "pids"))
    process.send_signal(number)
    assert process.wait(timeout=10.0) == INTERRUPTED


def test_a_supervisor_ended_by_kill_9_leaves_no_process(tmp_path: Path, start: Start) -> None:
    process = start({"trainer": MORTAL, "rollout-0": MORTAL})
    logs = [tmp_path / "trainer.log", tmp_path / "rollout-0.log"]
    eventually(lambda: all(log_says(log, "pids") for log in logs))
    pids = [pid for log in logs for pid in pids_in(log)]
    assert len(pids) == 4 and not any(map(has_ended, pids))
    process.kill()
    eventually(lambda: all(map(has_ended, pids)), seconds=10.0)


def test_a_child_whose_parent_died_before_die_with_parent_ends_at_once() -> None:
    orphan = f"from tandem.services.process import die_with_parent; die_with_parent({os.getpid() + 1}); print('alive')"
    done = run_python("-c", orphan)
    assert done.returncode != 0 and "alive" not in done.stdout
