"""How often and how soon what died is restarted, and when it is given up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.services.launchers import process_group
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.process_group import FAILED, FINISHED, ProcessGroup
from tandem.services.run import redis_child
from tandem.services.run.redis_child import RestartPolicy

SLEEP = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_child, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.01)


def test_restart_delays_double_and_end_at_the_fifth_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_child, "FIRST_DELAY_SECONDS", 0.5)
    policy = RestartPolicy()
    assert [policy.delay(1.0, 0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]


def test_progress_or_a_long_life_resets_the_count() -> None:
    steady, advancing = RestartPolicy(), RestartPolicy()
    for step in range(20):
        assert advancing.delay(1.0, step) is not None, "a run that gets on is worth any number of restarts"
        assert steady.delay(redis_child.STEADY_SECONDS, 0) is not None


def test_a_replica_that_dies_again_and_again_is_set_aside_while_the_others_work(tmp_path: Path) -> None:
    said: list[str] = []
    processes = ProcessGroup(report=said.append)
    table = {"trainer": SLEEP, "rollout-0": SLEEP, "rollout-1": "import sys; sys.exit('no memory')"}
    programs = {name: (sys.executable, "-c", code) for name, code in table.items()}
    processes.add(ChildSpec(name, program, tmp_path / f"{name}.log") for name, program in programs.items())
    processes.last_heartbeat = lambda name: float("inf") if name == "rollout-0" else 0.0
    completed = iter(range(10**6))
    processes.progress = lambda name: 0 if name == "rollout-1" else next(completed)

    def play() -> Iterator[str]:
        while "rollout-1" in processes.states():
            yield "waits"
        for _ in range(5):
            yield "goes on"

    playing = play()
    processes.on_poll.append(lambda: processes.finish() if next(playing, "end") == "end" else None)
    assert processes.run() == FINISHED
    assert [line for line in said if "giving up" in line] == [
        "rollout-1 died (exit code 1) for the 5th time in a row without progress; giving up"
    ], "its siblings' progress is not its own"
    assert said[-1] == "the run goes on without rollout-1"
    assert processes.states()["rollout-0"] == ("stopped", 0, 0)


def test_a_death_while_redis_is_away_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_OUTAGE_DELAY_SECONDS", 0.0)
    said: list[str] = []
    processes = ProcessGroup(report=said.append)
    program = (sys.executable, "-S", "-c", "import sys; sys.exit('Redis cannot be reached')")
    processes.add([ChildSpec("reward", program, tmp_path / "reward.log")])
    deaths = 2 * redis_child.MOST_DEATHS
    processes.redis_silence = lambda: 60.0 if processes.children[0].restarts < deaths else 0.0
    assert processes.run() == FAILED
    assert processes.children[0].restarts == deaths + redis_child.MOST_DEATHS - 1


def test_a_replica_starts_although_the_one_it_waits_for_leaves(tmp_path: Path) -> None:
    processes = ProcessGroup(report=[].append)
    specs = [
        ChildSpec(name, (sys.executable, "-c", SLEEP), tmp_path / f"{name}.log", start_after=after)
        for name, after in (("trainer", ""), ("rollout-0", ""), ("rollout-1", "rollout-0"))
    ]
    processes.add(specs)
    processes.last_heartbeat = lambda name: 0.0
    states: list[str] = []

    def poll() -> None:
        states.append(processes.states()["rollout-1"][0])
        processes.set_replicas("rollout", specs[2:])
        if states[-1] == "starting":
            processes.finish()

    processes.on_poll.append(poll)
    assert processes.run() == FINISHED
    assert states[0] == "waiting" and set(states) == {"waiting", "starting"}
