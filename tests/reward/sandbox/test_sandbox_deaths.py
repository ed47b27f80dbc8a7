"""Sandboxes that die or stop during a run: the test is repeated in a fresh sandbox, and the answer is not penalized."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.protos.contracts import Scored, ScoreItem, Unscored
from tandem.reward.sandbox import sandbox as sandbox_module
from tandem.reward.sandbox import trial as code_trial
from tandem.reward.sandbox.inside import seccomp as filter_program
from tandem.reward.sandbox.isolation import SandboxPool
from tandem.reward.sandbox.launcher import ZygoteLauncher
from tandem.reward.sandbox.sandbox import Limits, Sandbox, SandboxDiedError
from tandem.reward.scorers.code import CodeTests
from tandem.reward.workers.child_process import children_of, memory_kills
from tests.support.code_answers import isolated
from tests.support.processes import wait_until_gone
from tests.support.sandbox_runs import give_up_soon, settles, zygote_of

pytestmark = isolated

PAUSE = "time.sleep(30)"
PRINTS = f"import time\n{PAUSE}\nprint(2 * int(input()))"
ADDS = f"import time\ndef add(a, b):\n    {PAUSE}\n    return a + b"
SHAPES: dict[str, tuple[str, Any]] = {
    "script": (PRINTS, {"inputs": ["1"], "outputs": ["2"]}),
    "call": (ADDS, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}),
    "statement": (ADDS, ["assert add(1, 2) == 3"]),
}
Kill = Callable[..., list[int]]
CHAIN = ("zygote", "keeper", "guest", "program")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, shared_pool: SandboxPool) -> SandboxPool:
    monkeypatch.setattr(code_trial, "sandboxes", lambda packages, allow: shared_pool)
    return shared_pool


def running(pool: SandboxPool) -> list[dict[str, int]]:
    """For every sandbox in which a program runs, its processes by name; the oldest program comes first."""
    assert isinstance(pool._launcher, ZygoteLauncher)
    found = []
    with suppress(psutil.NoSuchProcess):
        zygote = zygote_of(pool._launcher)
        for keeper in children_of(zygote.pid):
            for guest in children_of(keeper):
                for program in children_of(guest)[:1]:
                    pids = (zygote.pid, keeper, guest, program)
                    found.append((psutil.Process(program).create_time(), program, dict(zip(CHAIN, pids, strict=True))))
    return [chain for _, _, chain in sorted(found, key=lambda one: one[:2])]


@pytest.fixture
def kill(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> Kill:
    """Kills the victim in one of the running sandboxes in the given number of runs, and lists whom it killed. `which`:
    0, the answer's sandbox, or -1, the last one that was started. In later runs, programs do not pause for long.
    """

    def install(
        victim: str,
        times: int = 1,
        which: int = 0,
        *,
        programs: int = 1,
        after: float = 0.05,
        pause: str = "pass",
        how: signal.Signals = signal.SIGKILL,
    ) -> list[int]:
        start, begun, killed = Sandbox.start, itertools.count(1), list[int]()

        def started(sandbox: Sandbox, kind: Any, texts: Sequence[str], *more: Any, **named: Any) -> None:
            doomed = len(killed) < times
            start(sandbox, kind, texts if doomed else [text.replace(PAUSE, pause) for text in texts], *more, **named)
            if doomed and next(begun) % programs == 0:
                settles(lambda: have_begun(running(pool), programs), "no program runs")
                time.sleep(after)
                killed.append(running(pool)[which][victim])
                os.kill(killed[-1], how)

        monkeypatch.setattr(Sandbox, "start", started)
        return killed

    return install


def have_begun(chains: list[dict[str, int]], programs: int) -> bool:
    """Whether so many programs run. The seccomp filter is installed last, right before a program begins."""
    statuses = [Path(f"/proc/{chain['program']}/status") for chain in chains]
    is_filtered = filter_program.available()
    with suppress(OSError):  # one of them ended meanwhile
        return len(chains) == programs and all(not is_filtered or "Seccomp:\t2" in one.read_text() for one in statuses)
    return False


CASES = [(shape, 0) for shape in SHAPES] + [("statement", -1)]  # for statements, each of the two sandboxes


@pytest.mark.parametrize(("victim", "times"), [*((one, 1) for one in CHAIN), *((one, 2) for one in CHAIN[:-1])])
@pytest.mark.parametrize(("shape", "which"), CASES)
def test_a_right_answer_passes_if_its_sandbox_is_killed_once_and_is_infrastructure_if_twice(
    kill: Kill, shape: str, which: int, victim: str, times: int
) -> None:
    killed = kill(victim, times, which, programs=2 if shape == "statement" else 1)
    code, ground_truth = SHAPES[shape]
    score = CodeTests(extract="whole").judge(ScoreItem("", code, ground_truth))
    assert len(killed) == times
    if times == 1:
        assert isinstance(score, Scored) and score.value == 1.0, score
    else:
        assert isinstance(score, Unscored) and score.reason == "infrastructure" and "twice" in score.detail, score


@pytest.mark.parametrize("tests", [{"inputs": ["1"] * 3, "outputs": ["2"] * 3}, ["assert add(1, 2) == 3"]])
def test_a_program_that_kills_itself_fails(pool: SandboxPool, tests: Any) -> None:
    program = "import os\nos.kill(os.getpid(), 9)"
    score = CodeTests(extract="whole", partial=True).judge(ScoreItem("", program, tests))
    assert isinstance(score, Scored) and score.value == 0.0
    assert score.breakdown["memory"] == score.breakdown["total"]


@pytest.mark.parametrize("known", [True, False])
def test_a_program_killed_twice_for_lack_of_memory_is_infrastructure(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Replaces the kernel's count of kills: either every call reports another kill, or the count is unknown."""
    kills = itertools.count()
    monkeypatch.setattr(code_trial, "memory_kills", lambda: next(kills) if known else None)
    score = CodeTests(extract="whole").judge(ScoreItem("", "import os\nos.kill(os.getpid(), 9)", SHAPES["script"][1]))
    if known:
        assert isinstance(score, Unscored) and score.reason == "infrastructure" and "twice" in score.detail, score
    else:
        assert isinstance(score, Scored) and score.breakdown["memory"] == 1.0, score


def test_memory_kills_reads_the_kernels_count() -> None:
    figures = Path("/proc/vmstat")
    known = figures.exists() and "\noom_kill " in figures.read_text()
    kills = memory_kills()
    assert kills is not None and kills >= 0 if known else kills is None


@pytest.mark.parametrize("victim", ["keeper", "guest"])
def test_stopped_processes_cost_no_answer_its_score(kill: Kill, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    monkeypatch.setattr(sandbox_module, "GRACE_SECONDS", 0.5)
    kill(victim, how=signal.SIGSTOP)
    code, tests = SHAPES["script"]
    score = CodeTests(extract="whole", seconds_per_test=0.5).judge(ScoreItem("", code.replace("30", "1"), tests))
    if victim == "keeper":  # the keeper only waits for the end
        assert isinstance(score, Scored) and score.value == 1.0, score
    else:
        assert isinstance(score, Unscored) and score.reason == "infrastructure", score


def test_waiting_for_a_sandbox_does_not_count_as_the_answers_time(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops the zygote that starts sandboxes. This is noticed only after the answer's own time would be over."""
    assert isinstance(pool._launcher, ZygoteLauncher)
    give_up_soon(monkeypatch, pool, 1.5)
    pool.take().close()
    stopped = zygote_of(pool._launcher)
    stopped.suspend()
    while pool._spare:
        pool._spare.popleft().close()
    scorer = CodeTests(extract="whole", seconds_per_test=1.0, seconds_per_answer=1.0)
    score = scorer.judge(ScoreItem("", "print(2 * int(input()))", {"inputs": ["1", "2"], "outputs": ["2", "4"]}))
    assert isinstance(score, Scored) and score.value == 1.0, score
    wait_until_gone(stopped.pid)


def test_a_lost_run_does_not_count_as_the_answers_time(kill: Kill) -> None:
    code, tests = SHAPES["script"]
    scorer = CodeTests(extract="whole", seconds_per_test=2.0, seconds_per_answer=2.0)
    kill("guest", after=1.5, pause="time.sleep(0.8)")
    score = scorer.judge(ScoreItem("", code, tests))
    assert isinstance(score, Scored) and score.value == 1.0, score


def test_a_dead_sandbox_raises_on_start_and_outcome(pool: SandboxPool, kill: Kill) -> None:
    sandbox = pool.take()
    kill("guest")
    with pytest.raises(SandboxDiedError, match="in the middle of a run"):
        sandbox.run("script", ["", "while True: pass"], Limits())
    assert not sandbox.clean
    with pytest.raises(SandboxDiedError, match="took no program"):
        sandbox.start("script", ["", "print(1)"], Limits())
    sandbox.close()


def test_the_kernel_kills_programs_before_their_parents(pool: SandboxPool) -> None:
    own = Path("/proc/self/oom_score_adj").read_text()
    sandbox = pool.take()
    sandbox.start("script", ["", "import time\ntime.sleep(30)"], Limits())
    found: dict[str, str] = {}

    def is_alone() -> bool:
        """The program of a sandbox that was closed just before may still be there, and end meanwhile."""
        with suppress(OSError):
            chains = running(pool)
            if have_begun(chains, 1):
                found.update((name, Path(f"/proc/{pid}/oom_score_adj").read_text()) for name, pid in chains[0].items())
                return True
        return False

    settles(is_alone, "no program runs, or another one does not end")
    sandbox.close()
    assert found == {"zygote": own, "keeper": own, "guest": own, "program": "1000\n"}
