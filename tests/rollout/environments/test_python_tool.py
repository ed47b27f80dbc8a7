"""The tool `python`: programs of the policy in sandboxes, their limits, their process's end, and wrong settings."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tandem.protos.errors import ConfigError, EpisodeError
from tandem.reward.sandbox import isolation, program_runner
from tandem.reward.sandbox.isolation import Isolation, find_isolation
from tandem.reward.sandbox.launcher import BareLauncher
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.process import EnvironmentPool, check_class
from tandem.rollout.environments.tools.environment import ToolEnvironment
from tests.support.processes import wait_until_gone
from tests.support.tool_steps import call, reset, step
from tests.support.waiting import eventually

SETTINGS = {"seconds_per_call": 0.5, "memory_bytes": 256 << 20, "packages": ["pluggy"]}

needs_isolation = pytest.mark.skipif(find_isolation().name == "none", reason="this machine has no isolation")


def run(*programs: str) -> list[dict[str, object]]:
    return [call("python", code=program) for program in programs]


@needs_isolation
def test_programs_answer_with_what_they_print_and_their_limits_and_faults_are_answers(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("treasure")
    config = EnvironmentConfig(tools=("python",), arguments={"python": SETTINGS, "max_result_chars": 200})

    async def main() -> None:
        pool = EnvironmentPool(config)
        await pool.start()
        try:
            one = await reset(pool, "one")
            assert await step(one, run("print(6 * 7)", "import pluggy; print(pluggy.__name__)")) == ["42", "pluggy"]
            assert await step(one, run("open('x', 'w').write('kept'); y = 1")) == ["[the program printed nothing]"]
            gone, unknown = await step(one, run("print(open('x').read())", "print(1); y"))
            assert gone.endswith("FileNotFoundError: [Errno 2] No such file or directory: 'x'"), "each starts anew"
            told = "error: exception: the program ended with exit code 1; it printed:\n1\nTraceback (most recent call "
            assert unknown.startswith(f'{told}last):\n  File "answer.py", line 1') and unknown.endswith("not defined")
            secret, hog, endless = await step(
                one,
                run(
                    f"try: print(open({str(tmp_path / 'secret')!r}).read())\nexcept OSError as e: print(e.strerror)",
                    "x = bytearray(300 << 20)",
                    "print('begun', flush=True)\nwhile True: pass",
                ),
            )
            assert secret == "No such file or directory"
            assert hog.endswith("\nMemoryError")
            limits = "the program had not ended after 0.5 s of processor time or 2 s"
            assert endless == f"error: timeout: {limits}; it printed:\nbegun"
            long, much, killed, errors = await step(
                one,
                run(
                    "print('a' * 300 + 'b')",
                    "while True: print('word' * 1000)",
                    "import os; os.kill(os.getpid(), 9)",
                    "import sys; sys.stderr.write('x' * 5000)",
                ),
            )
            assert long == f"{'a' * 100}\n[101 of 301 characters left out]\n{'a' * 99}b"
            assert much.startswith("error: exception: the program printed more than 1 MiB and was stopped; it printed:")
            assert killed == "error: crashed: the program was ended by signal 9"
            assert errors.startswith("[the last 4096 bytes of standard error]\nx")
            (late,) = await step(one, run("import time; time.sleep(60)"), 0.6)
            assert late.startswith("error: timeout: "), "the step's time bounds it, too"
        finally:
            await pool.close()

    asyncio.run(main())


@needs_isolation
def test_its_process_that_ends_costs_an_attempt_and_nothing_outlives_the_environments_process() -> None:
    async def main() -> None:
        pool = EnvironmentPool(EnvironmentConfig(tools=("python",)))
        await pool.start()
        try:
            environments = psutil.Process(pool._processes[0]._process.pid)  # type: ignore[union-attr]
            assert not environments.children(), "it was started to see whether there are sandboxes, and has ended"
            first, second = await asyncio.gather(reset(pool, "one"), reset(pool, "two"))
            (runner,) = environments.children()
            sleeping = [asyncio.create_task(step(one, run("import time; time.sleep(60)"))) for one in (first, second)]
            await asyncio.to_thread(eventually, lambda: num_busy(runner) == 2)
            lost = [runner, *runner.children(recursive=True)]
            runner.kill()
            for one in sleeping:
                with pytest.raises(EpisodeError, match="python: the process of its sandboxes has ended"):
                    await one
            third = await reset(pool, "three")
            assert await step(third, run("print(1)")) == ["1"], "the next episode starts it again"
            sleeping = [asyncio.create_task(step(third, run("import time; time.sleep(60)")))]
            (runner,) = environments.children()
            await asyncio.to_thread(eventually, lambda: num_busy(runner) == 1)
            lost += [runner, *runner.children(recursive=True)]
            os.kill(environments.pid, signal.SIGKILL)
            with pytest.raises(EpisodeError):
                await sleeping[0]
            for process in lost:
                await asyncio.to_thread(wait_until_gone, process.pid)
        finally:
            await pool.close()

    asyncio.run(main())


def num_busy(runner: psutil.Process) -> int:
    """How many programs run in its sandboxes: only they ask the kernel to be killed first."""
    return sum(oom_score_adjustment(one.pid) == "1000" for one in runner.children(recursive=True))


def oom_score_adjustment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/oom_score_adj").read_text().strip()
    except OSError:  # it has ended
        return ""


def test_without_isolation_the_run_is_refused_unless_its_recipe_allows_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolation, "_found", (Isolation("none", False, ("no namespaces",)), BareLauncher))
    answers = []
    for allowed in (False, True):
        settings = {"packages": [], "cpu_seconds": 1.0, "memory_bytes": 1 << 30, "allow_unsandboxed": allowed}
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(settings) + "\n"))
        monkeypatch.setattr(program_runner.os, "_exit", lambda _: None)
        program_runner.main()
        answers.append(json.loads(capsys.readouterr().out))
    refused, accepted = answers
    assert "this machine has no isolation for untrusted code (no namespaces)" in refused["error"]
    assert "allow_unsandboxed = true" in refused["error"] and accepted == {}


def test_wrong_settings_are_refused_in_one_line() -> None:
    arguments = {"python": {"packages": ["no_such_package"], "allow_unsandboxed": True}}
    with pytest.raises(ConfigError, match=r"^environment\.tools: python: packages: no_such_package is not installed"):
        asyncio.run(check_class(EnvironmentConfig(tools=("python",), arguments=arguments)))
    with pytest.raises(ContractError, match=r"^arguments\.python\.memory_bytes: Input should be greater than"):
        ToolEnvironment(["python"], python={"memory_bytes": 1})
    with pytest.raises(ContractError, match=r"^arguments\.python\.memory: Extra inputs are not permitted$"):
        ToolEnvironment(["python"], python={"memory": 1})
    with pytest.raises(ContractError, match=r'arguments\.python is for the tool "python", which tools does not name'):
        ToolEnvironment(["tests.support.tools:add"], python={})
