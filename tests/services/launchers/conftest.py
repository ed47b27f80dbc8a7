"""`tandem run` on a small recipe, as a process with small programs in place of the four services."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from tandem.services.buffer.buffer import Buffer
from tandem.services.cli import app
from tandem.services.commands.find_controller import controller_of
from tandem.services.commands.status import ask_controller
from tandem.services.config import dump_recipe
from tandem.services.run.folder import RunAddress, running
from tests.support.paths import ROOT
from tests.support.run_inputs import recipe_of, small_values
from tests.support.waiting import eventually

DEADLINE_SECONDS = 30.0

# `tandem`, with stand-ins for the services. Their programs see BUFFER, NAME and RUN (the run folder).
TANDEM = """
import sys
from tandem.services import cli
from tandem.services.launchers import supervisor
from tandem.services.launchers.children import ChildSpec

PROGRAMS = {
    "feed": "BUFFER.admit([(f'0-{i}', b'prompt') for i in range(6)], 6); beat(lambda: False)",
    "reward": "beat(lambda: False)",
    "trainer": "beat((RUN / 'finish').exists)",
}
START = '''
import os, pathlib, sys, time
from tandem.services.process import die_with_parent
die_with_parent(int(os.environ["TANDEM_PARENT_PID"]))
from tandem.services.buffer.buffer import Buffer
NAME, RUN = sys.argv[1], pathlib.Path(sys.argv[2])
BUFFER = Buffer(os.environ["TANDEM_REDIS_URL"], "small")
BUFFER.register_service(NAME, "")
def beat(done):
    while not done():
        BUFFER.heartbeat(NAME, {})
        time.sleep(0.05)
'''
def child_specs(recipe, redis_url, machines):
    return [
        ChildSpec(
            name, (sys.executable, "-c", START + program, name, str(recipe.folder)),
            recipe.folder / "logs" / f"{name}.log", {"TANDEM_REDIS_URL": redis_url},
        )
        for name, program in PROGRAMS.items()
    ]
supervisor.child_specs = child_specs
supervisor.dtype_hint = lambda recipe, facts: "hint about the dtype"
cli.main()
"""


class Run:
    """A recipe, and the `tandem` processes started on it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        recipe = recipe_of(small_values(folder), data={"max_epochs": 1})  # the stand-ins do not train
        self.folder = recipe.folder
        self.recipe_file = folder / "recipe.json"
        self.recipe_file.write_text(dump_recipe(recipe))
        self._stack = stack

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TANDEM, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def tandem(self, *arguments: str) -> tuple[int, str]:
        """The exit code and the output of a command that starts no run, in this process."""
        done = CliRunner().invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    def start_run(self, *arguments: str) -> tuple[subprocess.Popen[str], RunAddress]:
        """Starts the run and waits until every service is running and the feed has admitted its six groups."""
        process = self.start("run", str(self.recipe_file), *arguments)
        eventually(lambda: process.poll() is not None or self.all_running(), DEADLINE_SECONDS)
        address = running(self.folder)
        assert address is not None, process.communicate()[0]
        eventually(lambda: Buffer(address.redis_url, "small").counts()["admitted"] == 6)
        return process, address

    def end(self, process: subprocess.Popen[str], code: int = 0) -> str:
        """Lets the trainer finish; returns what the run printed."""
        (self.folder / "finish").touch()
        said, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == code, said
        return said

    def all_running(self) -> bool:
        """Asks the supervisor, which takes some processor time."""
        time.sleep(0.1)
        if running(self.folder) is None:
            return False
        place = controller_of(self.folder)
        return place is not None and {service.state for service in ask_controller(place).services} == {"running"}

    def pids(self) -> list[int]:
        """Process ids of the supervisor's children and its Redis."""
        address = running(self.folder)
        place = controller_of(self.folder)
        assert address is not None and place is not None
        services = [service.pid for service in ask_controller(place).services]
        return [*services, int(redis.Redis.from_url(address.redis_url).info("server")["process_id"])]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose processes end with the fixture."""
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    with ExitStack() as stack:
        yield Run(tmp_path, stack)
