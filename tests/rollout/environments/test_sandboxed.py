"""Environments in the sandbox see their own files, and nothing else of the machine."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tandem.protos.errors import ConfigError
from tandem.reward.sandbox.launcher import find_bubblewrap
from tandem.reward.sandbox.sandbox import SandboxError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool
from tests.support.paths import ROOT
from tests.support.processes import wait_until_gone

# An environment that answers with what it can do; an action is the path of a file that is not its own, and a port.
PRYING = """
import json, os, socket
from pathlib import Path
from tandem import Observation, StepResult
import beside

class Prying:
    def __init__(self, corpus):
        self.corpus = Path(corpus)
    async def reset(self, task, *, seed, episode_id):
        return Observation([])
    async def step(self, action, *, deadline, idempotency_key):
        secret, port = json.loads(action["content"])
        seen = {"corpus": self.corpus.read_text(), "beside": beside.WORD, "folder": os.getcwd()}
        seen["secret"] = Path(secret).exists()
        seen["processes"] = os.getpid() < 10 and not os.path.exists("/proc/1")
        Path(os.environ["HOME"], "note").write_text("kept")
        for name, attempt in {
            "network": lambda: socket.create_connection(("127.0.0.1", port), timeout=5),
            "write": lambda: Path(__file__).with_name("new.py").touch(),
            "corpus_write": lambda: self.corpus.write_text(""),
        }.items():
            try:
                attempt()
                seen[name] = True
            except OSError:
                seen[name] = False
        return StepResult([{"role": "user", "content": json.dumps(seen)}])
    async def close(self):
        pass
"""


@pytest.fixture(autouse=True)
def _needs_bubblewrap() -> None:
    try:
        find_bubblewrap()
    except SandboxError as error:
        pytest.skip(str(error))


SAMPLER = """
import asyncio
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool

async def main():
    pool = EnvironmentPool(EnvironmentConfig(path="examples/environments/guess_number.py:GuessNumber", sandbox=True))
    await pool.start()
    print("begun", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def play(config: EnvironmentConfig, action: str) -> str:
    pool = EnvironmentPool(config)
    try:
        await pool.start()
        environment = await pool.open("one")
        await environment.reset({}, seed=0, episode_id="one")
        message = {"role": "assistant", "content": action}
        result = await environment.step(message, deadline=time.time() + 30.0, idempotency_key="one/0")
    finally:
        await pool.close()
    return str(result.messages[0]["content"])


def test_an_environment_reads_its_own_files_and_nothing_else_and_reaches_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, data, other = (tmp_path / name for name in ("own", "data", "other"))
    for folder in (own, data, other):
        folder.mkdir()
    (own / "prying.py").write_text(PRYING)
    (own / "beside.py").write_text("WORD = 'beside'")
    (data / "corpus.txt").write_text("a corpus")
    (other / "secret.txt").write_text("a secret")
    monkeypatch.chdir(other)
    config = EnvironmentConfig(
        path="../own/prying.py:Prying",
        arguments={"corpus": "../data/corpus.txt"},
        sandbox=True,
        sandbox_files=("../data",),
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        action = json.dumps([str(other / "secret.txt"), server.getsockname()[1]])
        seen = json.loads(asyncio.run(play(config, action)))
        assert seen == {
            **{"corpus": "a corpus", "beside": "beside", "folder": str(other), "processes": True},
            **dict.fromkeys(("secret", "network", "write", "corpus_write"), False),
        }
        without = config.model_copy(update={"sandbox": False, "sandbox_files": ()})
        seen = json.loads(asyncio.run(play(without, action)))
        assert seen["secret"] and seen["network"] and seen["write"], "the attempts work where nothing hinders them"


def test_a_socket_beside_the_class_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only mount does not keep a program from connecting to it."""
    (tmp_path / "prying.py").write_text(PRYING)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    config = EnvironmentConfig(path=f"{tmp_path}/prying.py:Prying", arguments={"corpus": ""}, sandbox=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("redis.sock")
        with pytest.raises(ConfigError, match=r"run/redis\.sock is a socket .*; keep what they may see apart"):
            asyncio.run(EnvironmentPool(config).start())


def test_a_socket_among_the_sandbox_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "prying.py").write_text(PRYING)
    monkeypatch.chdir(tmp_path)
    path = f"{tmp_path}/class/prying.py:Prying"
    config = EnvironmentConfig(path=path, arguments={"corpus": ""}, sandbox=True, sandbox_files=("redis.sock",))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("redis.sock")
        with pytest.raises(ConfigError, match=r"redis\.sock is a socket .*; keep what they may see apart"):
            asyncio.run(EnvironmentPool(config).start())


def test_it_ends_with_a_sampler_that_is_killed() -> None:
    sampler = subprocess.Popen([sys.executable, "-c", SAMPLER], cwd=ROOT, stdout=subprocess.PIPE)
    assert sampler.stdout is not None and sampler.stdout.readline() == b"begun\n"
    started = [process.pid for process in psutil.Process(sampler.pid).children(recursive=True)]
    assert len(started) >= 2, "bubblewrap and the environments' process"
    sampler.kill()
    sampler.communicate(timeout=10.0)
    for process in started:
        wait_until_gone(process)


def test_what_cannot_be_in_the_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the tool python makes sandboxes of its own"):
        EnvironmentConfig(tools=("python",), sandbox=True)
    with pytest.raises(ValueError, match="only Tandem's own Python is in it"):
        EnvironmentConfig(path="a:B", sandbox=True, interpreter="/usr/bin/python3")
    with pytest.raises(ValueError, match="nothing is in a sandbox without sandbox = true"):
        EnvironmentConfig(path="a:B", sandbox_files=("data",))
    missing = EnvironmentConfig(path="a.py:B", sandbox=True, sandbox_files=("nowhere",))
    with pytest.raises(ConfigError, match=r"sandbox_files: nowhere does not exist"):
        asyncio.run(EnvironmentPool(missing).start())
    agent = EnvironmentConfig(path="examples/environments/self_check.py:SelfCheck", sandbox=True)
    with pytest.raises(ConfigError, match=r"environment\.sandbox: an agent calls the policy by HTTP"):
        asyncio.run(EnvironmentPool(agent).start())
