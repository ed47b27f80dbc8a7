"""`tandem env check`: its lines and exit codes, bad input, and checks whose process hangs, dies or leaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tandem.rollout.environments.checked_episode import CheckError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.services.cli import app
from tandem.services.commands import env_check
from tandem.services.commands.env_check import ConformanceChecks, read_task
from tests.services.commands.conftest import complaints
from tests.support.dataset_files import verl_row, write_parquet

FAULTY = "tests.support.faulty_environments"


def check(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["env", "check", *map(str, arguments)])


def found(name: str, path: str, task: Mapping[str, Any] = {}, **config: Any) -> Mapping[str, Any]:
    """What one check finds, in a process of its own."""
    checks = ConformanceChecks(EnvironmentConfig(path=f"{FAULTY}:{path}", **config), task, ["one"])
    return asyncio.run(checks.found(name, {}, 1))


def test_a_sound_class_passes_every_check() -> None:
    done = check(f"{FAULTY}:Sound")
    assert done.exit_code == 0 and done.stdout.splitlines() == [
        "import: passed",
        "contract: passed",
        "determinism: passed",
        "seeds: passed (3 seeds, 3 different episodes)",
        "concurrency: passed",
        "cancellation: passed",
        "close: passed",
        "leaks: passed",
        "snapshot: passed",
    ]


def test_one_failed_check_ends_with_exit_code_1_and_the_others_are_made(tmp_path: Path) -> None:
    actions = tmp_path / "actions.json"
    actions.write_text('["one", "two"]')
    done = check(f"{FAULTY}:Hashed", "--actions", actions)
    lines = done.stdout.splitlines()
    assert done.exit_code == 1 and len(lines) == 9
    assert lines[2].startswith("determinism: failed: two processes with the same seed and actions differ: step 1, ")
    assert lines[4] == "concurrency: passed (without comparison: it is not deterministic)"
    assert lines[8] == "snapshot: not checked: the class has no snapshot and restore"
    assert sum("failed" in line for line in lines) == 1


def test_a_class_that_does_not_import_is_checked_no_further() -> None:
    done = check("no_such_module:Game")
    assert done.exit_code == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith("import: failed: ModuleNotFoundError: No module named 'no_such_module'")


def test_what_an_environment_leaves_behind_is_counted_by_kind() -> None:
    with pytest.raises(CheckError) as failed:
        found("leaks", "Leaking")
    told = str(failed.value)
    assert told.startswith("after 12 closed episodes there are 12 more threads (left over, left over, left over, …)")
    for kind in ("12 more open files (/", "12 more child processes (sleep, ", "12 more temporary files (left"):
        assert kind in told


@pytest.mark.parametrize(
    ("path", "step_seconds", "told"),
    [
        ("Deadly", 30.0, "step 1 ended its process by SIGKILL"),
        ("Blocking", 0.5, "step 1 has not ended after 0.8 s; it blocks its process, or goes on after its cancellation"),
    ],
)
def test_a_call_that_ends_or_blocks_its_process_is_named(
    path: str, step_seconds: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_check, "_GRACE_SECONDS", 0.3)
    with pytest.raises(CheckError) as failed:
        found("contract", path, step_seconds=step_seconds)
    assert str(failed.value) == told


def test_the_class_sees_its_task_and_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_API_KEY", "k")
    monkeypatch.setenv("OTHER_API_KEY", "k")
    file = tmp_path / "train.parquet"
    write_parquet(file, [verl_row("1+1=", "2")])
    (reset, *_) = found("determinism", "Spy", read_task(str(file)), variables=("MY_API_KEY",))["observations"]
    seen, _, task = reset["messages"][0]["content"].partition(" ")
    assert seen == "['MY_API_KEY']"
    known = json.loads(task)
    assert known["ground_truth"] == "2" and known["prompt"][-1]["content"] == "1+1="
    assert list(known) == ["data_source", "prompt", "ability", "ground_truth", "extra_info"]


def test_a_task_may_be_an_object_with_some_of_the_columns() -> None:
    assert read_task('{"ground_truth": [1, 2]}') == {**read_task(""), "ground_truth": [1, 2]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Game"], "'Game' names no class; write module.path:Class or path/to/file.py:Class"),
        (["gone.py:Game"], "gone.py is no file (looked in "),
        ([f"{FAULTY}:Sound", "--arguments", "{"], "--arguments: it is no JSON: "),
        ([f"{FAULTY}:Sound", "--arguments", "[]"], "--arguments: [] is no JSON object; write e.g. "),
        ([f"{FAULTY}:Sound", "--task", '{"answer": 1}'], "--task has the key 'answer'; a task has data_source, "),
        ([f"{FAULTY}:Sound", "--task", "{1}"], "--task: it is no JSON: "),
        ([f"{FAULTY}:Sound", "--task", "gone.parquet"], "dataset gone.parquet: no such file; "),
        ([f"{FAULTY}:Sound", "--actions", "gone.json"], "--actions gone.json: No such file or directory; "),
        ([f"{FAULTY}:Sound", "--variable", "NOT_SET"], "--variable: the environment variable 'NOT_SET' is not set"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], told: str) -> None:
    done = check(*arguments)
    assert done.exit_code == 2 and not done.stdout
    (line,) = complaints(done)
    assert line.startswith(told)


def test_actions_are_a_list_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "actions.json"
    for content in ("{}", "[]", "[1]"):
        file.write_text(content)
        (line,) = complaints(check(f"{FAULTY}:Sound", "--actions", file))
        assert line == f'--actions {file}: it has no list of texts; write e.g. ["8", "4"]'
