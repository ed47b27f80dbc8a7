"""What `tandem chaos` refuses, in one line, before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.services.cli import app
from tandem.services.commands.chaos_run import usable_kinds
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
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    (line,) = refusal(tmp_path, *arguments).splitlines()
    assert line.startswith("tandem: ") and said in line


def test_there_is_at_least_one_fault(tmp_path: Path) -> None:
    assert "greater than or equal to 1" in refusal(tmp_path, "--faults", "0")


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
