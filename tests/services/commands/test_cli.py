"""The command line: help, and the commands that need no run. test_bad_input.py has what `tandem run` refuses."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.services.cli import app
from tandem.services.config import dump_recipe, parse_recipe
from tandem.services.trainer.launch import torchrun_arguments
from tests.services.test_imports import COMMANDS
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.run_inputs import recipe_of, small_values, write_dataset


def tandem(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": "", "HF_HUB_OFFLINE": "1", **environment}
    return run_python("-m", "tandem.services.cli", *arguments, cwd=cwd, **variables)


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line with which a command refused bad input."""
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem: ")
    assert done.stdout == ""
    return line.removeprefix("tandem: ")


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.json"
    file.write_text(dump_recipe(recipe_of(small_values(tmp_path))))
    return file


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in ([], ["data"], ["reward"])], ids=" ".join
)
def test_help_of_every_command_has_an_example(command: list[str]) -> None:
    said = CliRunner().invoke(app, [*command, "--help"])
    assert said.exit_code == 0
    assert f"Example: tandem {' '.join(command)}" in " ".join(said.stdout.split())


def test_help_lists_every_command_and_is_printed_without_arguments() -> None:
    listed = tandem("--help").stdout
    for command in COMMANDS:
        assert not command or f"  {command[0]} " in listed
    done = tandem()
    assert "Usage: tandem" in done.stdout + done.stderr


def test_a_missing_recipe_is_a_one_line_error(tmp_path: Path) -> None:
    for command in ("run", "sft", "eval", "config"):
        assert "no such file" in complaint(tandem(command, str(tmp_path / "gone.toml")))
    assert "no such file" in complaint(tandem("serve", "feed", str(tmp_path / "gone.toml")))


def test_a_service_started_by_hand_needs_a_run_or_a_redis(recipe_file: Path) -> None:
    line = complaint(tandem("serve", "reward", str(recipe_file)))
    assert "tandem run" in line and "TANDEM_REDIS_URL" in line


def test_an_unknown_service_is_refused_with_the_known_ones(recipe_file: Path) -> None:
    done = tandem("serve", "trainr", str(recipe_file))
    assert done.returncode == 2
    assert all(service in done.stderr for service in ("feed", "rollout", "reward", "trainer"))


@pytest.mark.parametrize("command", ["status", "ledger", "replay"])
def test_a_folder_without_a_run_is_a_one_line_error(command: str, tmp_path: Path) -> None:
    assert "is not a run folder" in complaint(tandem(command, str(tmp_path)))
    assert "no run found under runs/" in complaint(tandem(command, cwd=tmp_path))


def test_commands_default_to_the_run_started_last(tmp_path: Path) -> None:
    values = small_values(tmp_path)
    for age, name in enumerate(("older", "newer")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(dump_recipe(recipe_of(values, run={"folder": str(folder)})))
        os.utime(folder / "config.json", (age, age))
    done = tandem("status", cwd=tmp_path)
    assert done.returncode == 0
    assert "runs/newer" in done.stdout and "older" not in done.stdout


def test_status_of_a_finished_run_prints_its_summary(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(dump_recipe(recipe_of(small_values(tmp_path))))
    (folder / "summary.json").write_text(
        json.dumps({"final_accuracy": 0.875, "train_steps": 40, "groups": {"trained": 80}})
    )
    said = tandem("status", str(folder)).stdout
    assert "finished" in said and "0.875" in said and "trained" in said and "80" in said


def test_config_prints_the_resolved_recipe(recipe_file: Path) -> None:
    done = tandem("config", str(recipe_file), "run.staleness_budget=4")
    assert done.returncode == 0
    assert "staleness_budget = 4  # default: 2" in done.stdout
    as_json = tandem("config", str(recipe_file), "run.staleness_budget=4", "--json")
    assert parse_recipe(tomllib.loads(done.stdout)) == parse_recipe(json.loads(as_json.stdout))


def test_config_without_a_recipe_explains_every_key() -> None:
    said = tandem("config").stdout
    assert "trainer.learning_rate (number ≥ 0.0; default 1e-06)" in said
    assert "model.path (text; must be given)" in said


def test_data_check_reports_the_faults_of_a_file(tmp_path: Path) -> None:
    file = write_dataset(tmp_path / "rows.jsonl")
    assert tandem("data", "check", str(file)).returncode == 0
    file.write_text(file.read_text() + "{}\n")
    assert tandem("data", "check", str(file)).returncode == 1
    assert "no such file" in complaint(tandem("data", "check", str(tmp_path / "gone")))


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_ranks_of_several_machines_meet_at_the_address_in_the_recipe(tmp_path: Path) -> None:
    recipe = recipe_of(small_values(tmp_path), trainer={"num_nodes": 2, "rendezvous": "head:29400"})
    arguments = torchrun_arguments(recipe, ["config.json"])
    assert option(arguments, "--nnodes") == "2" and option(arguments, "--rdzv-endpoint") == "head:29400"
    assert int(option(arguments, "--max-restarts")) > 0
    assert option(arguments, "--log-dir") == os.devnull, "torchrun would leave folders in /tmp"
    assert arguments[-5:] == ["--module", "tandem.services.cli", "serve", "trainer", "config.json"]
