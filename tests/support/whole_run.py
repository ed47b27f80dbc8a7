"""A whole run for the tests: tiny model, small data, a recipe, and `tandem` started on it as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tandem.protos import control_pb2
from tandem.protos.codec import decode_group
from tandem.protos.errors import DeadlineError, UnavailableError
from tandem.protos.types import ScoredTrajectory, TrajectoryGroup
from tandem.services.commands.find_controller import controller_of
from tandem.services.commands.status import ask_controller
from tandem.services.data.arithmetic import write_task
from tandem.services.data.tiny_model import build_tiny_model
from tandem.services.run.json_files import METRICS_FILE, JsonLines
from tandem.trainer.batch.record import read_record, recorded_versions
from tests.support.paths import ROOT
from tests.support.processes import run_tandem

RUN_DEADLINE_SECONDS = 300.0
UNHURRIED = {"scorer": f"{ROOT}/tests/support/scorers.py:unhurried_digit_share"}
"""The reward of a run that goes on beside a test: it leaves the processors to the processes that the test waits for."""


class WholeRun:
    """A run in its own folder: a small recipe with `sections` merged over it. Answers have 256 tokens by default."""

    def __init__(self, folder: Path, *, tied: bool = True, **sections: Mapping[str, Any]) -> None:
        self.scratch = folder
        self.folder = folder / "run"
        self.model = build_tiny_model(folder / "model", tied=tied, ends=False)
        write_task(folder / "data", seed=1)
        sizes = {"total_batches": 10, "groups_per_batch": 4, "staleness_budget": 4}
        values: dict[str, dict[str, Any]] = {
            "run": {"run_id": "whole", "folder": str(self.folder), **sizes},
            "model": {"path": str(self.model)},
            "data": {"train_file": str(folder / "data" / "train.parquet"), "max_prompt_tokens": 64},
            "rollout": {
                "samples_per_prompt": 4,
                "max_response_tokens": 256,
                "kv_cache_bytes": 64 << 20,
                "max_groups_in_flight": 20,
            },
            "reward": {"scorer": f"{ROOT}/tests/support/scorers.py:digit_share"},
            "trainer": {"learning_rate": 1e-3, "checkpoint_every": 4},
        }
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
        self.recipe = folder / "recipe.json"
        self.recipe.write_text(json.dumps(values))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `tandem …` in the background, with its output in `run.out`."""
        command = [sys.executable, "-m", "tandem.services.cli", *arguments]
        environment = {**os.environ, "TANDEM_REDIS_URL": "", "HF_HUB_OFFLINE": "1"}
        with open(self.scratch / "run.out", "a") as out:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)

    def tandem(
        self, *arguments: str, deadline: float = RUN_DEADLINE_SECONDS, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs `tandem …` to its end, with these additional environment variables."""
        return run_tandem(*arguments, seconds=deadline, **variables)

    def finish(self, *overrides: str) -> None:
        """Runs `tandem run` to its end; it must succeed and leave no temporary file."""
        with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # short, because socket paths are limited
            done = self.tandem("run", str(self.recipe), *overrides, TMPDIR=temporary)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + self.logs()
            assert os.listdir(temporary) == []

    def logs(self) -> str:
        logs = sorted((self.folder / "logs").glob("*.log"))
        return "".join(f"\n== {file.name}\n{file.read_text()[-1500:]}" for file in logs)

    def metrics(self) -> list[dict[str, Any]]:
        return JsonLines(self.folder / METRICS_FILE).read()

    def last_batch(self) -> dict[str, Any]:
        """The last line of the metrics; step 0 before the first one, and after a recovery that trains all anew."""
        return [{"step": 0}, *self.metrics()][-1]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))

    def records(self) -> dict[int, list[TrajectoryGroup]]:
        """The groups of every recorded batch, by version."""
        return {
            version: [decode_group(payload) for payload in read_record(self.folder, version)[1].values()]
            for version in recorded_versions(self.folder)
        }

    def trained_rows(self) -> list[tuple[int, ScoredTrajectory]]:
        """(version trained into, row) for every recorded row."""
        records = self.records().items()
        return [(version, row) for version, groups in records for group in groups for row in group.scored_rows]

    def instances(self) -> Counter[str]:
        """How many records each prompt instance is in."""
        return Counter(group.group_id for groups in self.records().values() for group in groups)

    def ledger(self) -> dict[str, Any]:
        done = self.tandem("ledger", str(self.folder), "--verify", "--json", deadline=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    def status(self) -> control_pb2.StatusReply:
        """What the controller of the running run tells."""
        place = controller_of(self.folder)
        assert place is not None
        return ask_controller(place)

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[str], deadline: float = 240.0) -> None:
        end = time.monotonic() + deadline
        fault: UnavailableError | None = None
        while True:
            try:
                if condition():
                    return
            except DeadlineError:  # a controller that answers late, beside other tests
                pass
            except UnavailableError as error:  # Redis ends with the run
                fault = error
            if fault or process.poll() is not None or time.monotonic() > end:
                said = (self.scratch / "run.out").read_text()[-3000:] + self.logs()
                raise AssertionError(f"waited too long or ended early with {process.poll()}: {said}") from fault
            time.sleep(0.1)


def processes_of(run: WholeRun) -> list[psutil.Process]:
    """All living processes whose command line or environment names the run's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(run.scratch) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def service_process(supervisor: subprocess.Popen[str], service: str) -> psutil.Process:
    """The process of a service below its supervisor."""
    for child in psutil.Process(supervisor.pid).children():
        try:
            command = child.cmdline()
        except psutil.NoSuchProcess:
            continue  # killed just before and not yet reaped
        if "serve" in command and command[command.index("serve") + 1] == service:
            return child
    raise AssertionError(f"no {service} below {supervisor.pid}")


def kill_tree(supervisor: subprocess.Popen[str]) -> None:
    """Kills every process of a run with kill -9, the supervisor first, which would restart the others. They are gone
    when this returns.
    """
    root = psutil.Process(supervisor.pid)
    tree = [root, *root.children(recursive=True)]
    for process in tree:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue  # it died with another process
    supervisor.wait(10)
    assert psutil.wait_procs(tree, timeout=10)[1] == []
