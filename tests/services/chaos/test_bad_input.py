"""What `tandem chaos` refuses, in one line, before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.protos.errors import EnvironmentLackError
from tandem.services.chaos.injector import Result
from tandem.services.cli import app
from tandem.services.commands import chaos_run
from tandem.services.commands.chaos_run import show, usable_kinds
from tests.support.run_inputs import recipe_of, small_values


def refusal(folder: Path, *arguments: str) -> str:
    values = small_values(folder)
    (folder / "recipe.json").write_text(json.dumps(values))
    done = CliRunner().invoke(app, ["chaos", str(folder / "recipe.json"), *arguments])
    assert done.exit_code == 2, done.output
    assert not (folder / "run").exists()
    return done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kinds", "kill,flood"], "'flood' is no kind of fault; there are kill, stop, cut, slow, disk, redis-loss"),
        (["--kinds", "kill,"], "'' is no kind of fault"),
        (["--kinds", "redis-loss", "run.redis_url=redis://127.0.0.1:1"], "a Redis that is not its own"),
        (["--kinds", "kill,cut", "run.redis_url=rediss://127.0.0.1:1"], "reached by TLS"),
        (["rollout.engines=vllm"], "rollout.engine"),
        (["--json", "/no/such/folder/chaos.json"], "/no/such/folder/chaos.json cannot be written (No such file"),
        (["--json", "/proc/chaos.json"], "--json: /proc/chaos.json cannot be written"),
        (["--json", "/"], "--json: / cannot be written (Is a directory)"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    (line,) = refusal(tmp_path, *arguments).splitlines()
    assert line.startswith("tandem: ") and said in line


@pytest.mark.parametrize(("option", "value", "least"), [("--faults", "0", 1), ("--seed", "-1", 0)])
def test_a_number_that_is_too_small_is_refused(tmp_path: Path, option: str, value: str, least: int) -> None:
    said = refusal(tmp_path, option, value)  # the seed -1 would draw what 1 draws
    assert option in said and f"greater than or equal to {least}" in said


def test_a_kind_named_twice_counts_once(tmp_path: Path) -> None:
    assert usable_kinds("stop,kill, stop", recipe_of(small_values(tmp_path)), print) == ["kill", "stop"]


def test_a_disk_of_its_own_needs_an_empty_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    recipe = recipe_of(small_values(tmp_path))
    (recipe.folder / "logs").mkdir(parents=True)
    said: list[str] = []
    assert "disk" not in usable_kinds("", recipe, said.append)
    assert f"without disk: {recipe.folder} is not empty" in said[-1]


def test_a_disk_that_may_take_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_run, "disk_need_bytes", lambda recipe, facts: 1e15)
    with pytest.raises(
        EnvironmentLackError, match=r"may take 1000001.1 GB of memory, and .* GB are free; leave out disk"
    ):
        chaos_run._small_disk(recipe_of(small_values(tmp_path)), None)


def test_a_kind_that_this_machine_lacks_is_refused_if_it_is_named_and_else_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    monkeypatch.setenv("PATH", str(tmp_path))  # no `mount`
    assert "a full disk needs the program mount" in refusal(tmp_path, "--kinds", "disk")
    said: list[str] = []
    recipe = recipe_of(small_values(tmp_path / "other"))
    assert usable_kinds("", recipe, said.append) == ["kill", "stop", "cut", "slow", "redis-loss"]
    assert len(said) == 1 and said[0].startswith("without disk: a full disk needs")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            Result(exit_code=2),
            "the run failed (exit code 2); it printed last:\nmodel.path is wrong\n"
            "only 0 of 5 faults were made before the run ended\n0 faults in 0 s; the ledger was checked 0 times\n",
        ),
        (Result(exit_code=0, num_checks=1), "only 0 of 5 faults were made; raise run.total_batches\n"),
        (Result(interrupted=True, num_checks=2), "interrupted after 0 of 5 faults\n"),
        (
            Result(violations=["lost"], num_checks=2),
            "VIOLATION: lost\nonly 0 of 5 faults were made before the run ended",
        ),
    ],
)
def test_a_run_that_ends_early_says_why(capsys: pytest.CaptureFixture[str], result: Result, said: str) -> None:
    assert show(result, 5, ["model.path is wrong"], Console())
    assert capsys.readouterr().out.startswith(said)
